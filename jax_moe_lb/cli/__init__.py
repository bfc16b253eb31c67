"""Command line `jax-moe-lb`: plan recorded counts, simulate training steps, compile for absent machines, and report
the implementations in use.
"""

from jax_moe_lb.cli.entry import main as main
