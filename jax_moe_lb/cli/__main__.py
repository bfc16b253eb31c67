"""`python -m jax_moe_lb.cli`."""

import sys

from jax_moe_lb.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
