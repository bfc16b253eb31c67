import jax

# Other libraries promote dtypes and ranks.
jax.config.update("jax_numpy_dtype_promotion", "standard")
jax.config.update("jax_numpy_rank_promotion", "allow")
jax.config.update("jax_enable_compilation_cache", True)

# EasyDeL adds flags to XLA_FLAGS that jaxlib 0.10 refuses; a backend that exists does not read them.
jax.devices()
