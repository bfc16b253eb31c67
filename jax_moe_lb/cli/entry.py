"""Entry point of the program `jax-moe-lb`."""

import sys
from collections.abc import Sequence
from importlib import import_module

from jax_moe_lb.core.extras import missing_of_tools

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, as `app.main`; without the extra `[tools]`, print the command that installs it."""
    if missing := missing_of_tools():
        print(f"error: {missing}", file=sys.stderr)
        return 2
    try:
        # The imports take seconds, in which Ctrl-C has no handler of typer.
        return import_module("jax_moe_lb.cli.app").main(argv)
    except KeyboardInterrupt:
        return INTERRUPTED
