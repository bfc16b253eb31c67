"""`python -m jax_moe_lb.cli` is `jax-moe-lb` where the program is not on the path."""

import sys

from jax_moe_lb.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
