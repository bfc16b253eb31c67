"""Complete networks on the public API of jax_moe_lb; `python -m models.train` trains one."""
