"""Marks of parametrized cases."""

import pytest


def mostly_thorough(cases, everyday):
    """Return cases, marked `thorough` except for those of `everyday`."""
    return [case if case in everyday else pytest.param(case, marks=pytest.mark.thorough) for case in cases]
