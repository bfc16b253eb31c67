"""The command line, `jax-moe-lb`, plans for recorded counts, simulates training steps, compiles for
machines that are not here and says what runs here.
"""

from jax_moe_lb.cli.app import main as main
