"""Examples in docstrings run, and every public callable has one."""

import doctest
import functools
import importlib
import inspect
import io
import pkgutil

import pytest

import jax_moe_lb

EXTENSIONS = {"_ffi", "_ffi_cuda", "_planning"}

ROOMS = sorted(value.__name__ for name in dir(jax_moe_lb) if inspect.ismodule(value := getattr(jax_moe_lb, name)))
"""Modules with names imported by users."""

COMPILED = {
    "jax_moe_lb.nn.moe",
    "jax_moe_lb.layer.moe",
    "jax_moe_lb.transport.fsdp",
    "jax_moe_lb.routing.routers",
    "jax_moe_lb.routing.more_routers",
    "jax_moe_lb.transport.serving_ranks",
    "jax_moe_lb.transport.compression",
    "jax_moe_lb.kernels.slot_places",
}
"""Modules whose examples compile layers, or programs that take about a second."""

SLOWEST = {"jax_moe_lb.core.stats", "jax_moe_lb.planners.exact_search", "jax_moe_lb.advise.advise"}
SLOWEST |= {"jax_moe_lb.core.export", "jax_moe_lb.nn.variables"}
"""Modules whose examples take 4 CPU seconds or more, and whose functions have other tests."""

MARKS = [(pytest.mark.slow, COMPILED | SLOWEST), (pytest.mark.thorough, SLOWEST)]

WITHOUT_EXAMPLE = {
    "Buffer": "it stands in a `ProgramReport`",
    "GradientResidual": "only `MoE` makes one, and the example of `keep_residuals` shows it",
    "ProgramCollective": "it stands in a `ProgramReport`",
    "Operation": "it stands in a `ProgramReport`",
    "ProgramReport": "only `compile_for` and `compile_layer` make one, and their examples show it",
    "Report": "only `simulate` and `replay` make one, and their examples show it",
    "Span": "it stands in a `Timeline`",
    "Tuned": "only `tune` makes one, and its example shows it",
    "TunedForm": "it stands in a `Tuned`",
    "Timeline": "only `ProgramReport.timeline` makes one, and its example shows it",
    "Stats": "only `moe` makes one, and its example shows it",
}
"""Public names that are not called, each with the reason."""


class Finder(doctest.DocTestFinder):
    """Finder that includes functions wrapped by the checks of shapes and types, whose globals belong to another
    module.
    """

    def _from_module(self, module, object):
        if inspect.isfunction(object):
            return object.__module__ == module.__name__
        return super()._from_module(module, object)


def raised(name):
    """Raise import errors, so that no package is skipped silently."""
    importlib.import_module(name)


def modules():
    found = pkgutil.walk_packages(jax_moe_lb.__path__, "jax_moe_lb.", onerror=raised)
    return [name for name in ("jax_moe_lb", *(m.name for m in found)) if name.rpartition(".")[2] not in EXTENSIONS]


@functools.cache
def examples(name):
    """Return the docstrings of a module with examples, by qualified name."""
    module = importlib.import_module(name)
    return {test.name: test for test in Finder().find(module, name) if test.examples}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[mark for mark, names in MARKS if name in names]) for name in modules()]
)
def test_examples_run(name):
    report = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in examples(name).values():
        runner.run(test, out=report.write)
    assert not runner.failures, report.getvalue()


def public_names():
    """Return functions and classes imported by users."""
    exported = {}
    for room in map(importlib.import_module, ROOMS):
        names = getattr(room, "__all__", [name for name in vars(room) if not name.startswith("_")])
        exported |= {name: getattr(room, name) for name in names}
    return {name: value for name, value in exported.items() if inspect.isfunction(value) or inspect.isclass(value)}


PUBLIC = public_names()


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - WITHOUT_EXAMPLE.keys()))
def test_public_names_have_an_example(name):
    """The example may be in the docstring, or, for a class, in the docstring of a method."""
    value = PUBLIC[name]
    described = f"{value.__module__}.{value.__qualname__}"
    shown = [test for test in examples(value.__module__) if test == described or test.startswith(f"{described}.")]
    assert shown, f"{described} has no example in its docstring"


def test_names_without_example_exist():
    assert WITHOUT_EXAMPLE.keys() <= PUBLIC.keys()
