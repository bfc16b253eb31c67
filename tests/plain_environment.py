"""Hides modules of other distributions from a process: the environment of an installed wheel, without another venv."""

import functools
import importlib.metadata
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SHOWN: frozenset[str] = frozenset()


class Only:
    """Finder of the modules in `SHOWN` and of the standard library, by another finder."""

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        shown = top in SHOWN or top in sys.stdlib_module_names or top.startswith("_sysconfigdata")
        return self.finder.find_spec(name, path, target) if shown else None


def write_sitecustomize(folder: Path, requirements: Iterable[str], others: Iterable[str] = ()) -> None:
    """Write a module that hides others at the start of Python, if the folder is in `PYTHONPATH`.

    Args:
        folder: an existing folder.
        requirements: shown distributions, with all that they require, in the form of `pip install`.
        others: names of further shown modules.
    """
    shown = {"sitecustomize", "usercustomize", *others}.union(*map(modules, closure(frozenset(requirements))))
    parts = ("import sys", f"SHOWN = {shown!r}", inspect.getsource(Only), "sys.meta_path[:] = map(Only, sys.meta_path)")
    (folder / "sitecustomize.py").write_text("\n".join(parts))


@functools.cache
def closure(requirements: frozenset[str]) -> frozenset[str]:
    """Return the names of installed distributions that requirements need, including extras."""
    seen: set[tuple[str, str]] = set()
    todo = list(map(Requirement, requirements))
    while todo:
        one = todo.pop()
        name = canonicalize_name(one.name)
        for extra in {"", *one.extras} - {extra for of, extra in seen if of == name}:
            seen.add((name, extra))
            needed = map(Requirement, importlib.metadata.requires(name) or ())
            todo += [need for need in needed if need.marker is None or need.marker.evaluate({"extra": extra})]
    return frozenset(name for name, _ in seen)


@functools.cache
def modules(distribution: str) -> frozenset[str]:
    """Return the names of the top-level modules of an installed distribution."""
    files = importlib.metadata.files(distribution) or ()
    return frozenset(file.parts[0].partition(".")[0] for file in files) | {distribution.replace("-", "_")}
