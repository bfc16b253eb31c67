"""Cases of `make test`, and further ones of the nightly run."""

from collections.abc import Iterable
from typing import Any

import pytest


def parametrize(names: str, usual: Iterable, further: Iterable = (), **options: Any) -> pytest.MarkDecorator:
    """Parametrize a test with usual cases, and with those of `further` that are not among them, marked `thorough`."""
    usual, is_single = list(usual), "," not in names
    others = [case for case in further if case not in usual]
    marked = [pytest.param(*([case] if is_single else case), marks=pytest.mark.thorough) for case in others]
    return pytest.mark.parametrize(names, [*usual, *marked], **options)
