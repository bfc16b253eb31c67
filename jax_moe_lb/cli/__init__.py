"""The command line, `jax-moe-lb`: plans for recorded counts, and what runs on this machine."""

from jax_moe_lb.cli.app import main as main
