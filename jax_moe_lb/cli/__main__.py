"""`python -m jax_moe_lb.cli`, the same as the program `jax-moe-lb`."""

import sys

from jax_moe_lb.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
