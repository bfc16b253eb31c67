"""The command line of a benchmark that has nothing to choose."""

import argparse


def no_options(what: str | None) -> None:
    """Answers `--help` with what a benchmark does, and refuses anything else, before it begins.

    Args:
        what: the docstring of its module.
    """
    argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
