"""Every public constructor and command line option accepts a wrong value or refuses it in one line, within seconds.

The cases are generated from signatures, so new classes, commands and options take part by themselves.
"""

import dataclasses
import importlib
import inspect
import time
import typing
from enum import Enum

import jax
import jaxtyping
import numpy as np
import pytest
import typer
import yaml
from flax import nnx

from jax_moe_lb import ExpertConfig, MoE, TopK, Topology, balancers, core, kernels, layer, nn, routing, sim, transport
from jax_moe_lb.aot import LayerSizes, Target
from jax_moe_lb.cli import main
from jax_moe_lb.cli.app import app
from jax_moe_lb.core.checks import shown
from jax_moe_lb.sim import Links
from jax_moe_lb.transport import ExpertDomains
from tests.layer_cases import make_mesh

MOST_S = 5.0

HOSTILE = (
    *(float("nan"), float("inf"), -float("inf"), 1e308, 0.5, -1, 0, 2**31, 2**63, 10**400, True, None, "", "----"),
    *("x" * 60_000, b"x", [1], (), ("x",), {"x": 1}, object(), 1j, np.ones((2, 2)), TopK, lambda: None),
)

RESULTS = {"Communication", "ExpertDomainChoice", "Report", "TransportCost", "Work"}
"""Dataclasses made by the package only."""

OTHERS = {f"bytes_per_s is None; expected a finite rate above 0 of {2**31} ranks"}
"""Messages about another argument, which became necessary."""

EXAMPLES = {
    int: 1,
    float: 1.0,
    bool: True,
    str: "x",
    "GroupLimit": {"num_groups": 2, "top_groups": 1},
    "Level": {"name": "gpu", "size": 2},
    "Topology": {"levels": (core.Level("gpu", 2),), "ranks_per_domain": 2},
    "Links": {"name": "gpu", "size": 2, "bytes_per_s": 1.0},
    "MeasuredGemm": {"rows": (1.0, 2.0), "flops_per_s": (1.0, 2.0)},
    "Cluster": {"levels": (Links("gpu", 2, 1e9),)},
    routing.Router: TopK(2),
    balancers.Balancer: balancers.Greedy(),
    Topology: Topology.flat(2),
    ExpertDomains: ExpertDomains(Topology.flat(2), ("x",), 2),
}
"""Valid values by type, and valid arguments by class where these are not enough."""


def constructors():
    found = {}
    for module in (balancers, core, kernels, layer, nn, routing, sim, transport):
        for name in module.__all__:
            value = getattr(module, name)
            is_plain = dataclasses.is_dataclass(value) and not inspect.isabstract(value) and name not in RESULTS
            # Transformations of JAX put placeholders into the fields of pytrees.
            if inspect.isclass(value) and is_plain and not is_pytree(value):
                found[name] = value
    return {**found, "LayerSizes": LayerSizes, "Target": Target}


def is_pytree(cls):
    return jax.tree_util.all_leaves([object.__new__(cls)]) is False


def valid(kind):
    """Return a valid value of an annotation."""
    if kind in EXAMPLES:
        return EXAMPLES[kind]
    options = typing.get_args(kind)
    if type(None) in options:
        return None
    if typing.get_origin(kind) is tuple:
        return (valid(options[0]),)
    if typing.get_origin(kind) is typing.Literal:
        return options[0]
    if inspect.isclass(kind) and issubclass(kind, Enum):
        return next(iter(kind))
    if callable(kind) and "Callable" in str(kind):
        return lambda *args: None
    return kind(**valid_arguments(kind))


def valid_arguments(cls):
    required = {n: p for n, p in inspect.signature(cls).parameters.items() if p.default is inspect.Parameter.empty}
    given = EXAMPLES.get(cls.__name__, {})
    hints = typing.get_type_hints(cls)
    return {**{name: valid(hints[name]) for name in required if name not in given}, **given}


@pytest.fixture
def unchecked(monkeypatch):
    """Turn off the annotation checks of the tests, which come before those of the package."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


def complaint(construct, argument, value):
    """Return the reason why a construction is neither legal nor refused well; `None` if it is."""
    start = time.process_time()
    try:
        construct(value)
        message = None
    except (TypeError, ValueError) as error:
        message = str(error)
    except Exception as error:
        return f"{argument}={shown(value)}: {type(error).__name__}: {error}"
    if time.process_time() - start > MOST_S:
        return f"{argument}={shown(value)} took {time.process_time() - start:.0f} s"
    if message is None:
        return None
    texts = {
        text[:20] for text in (shown(value), str(value)[:200], repr(value)[:200], f"{getattr(value, '__name__', 'x')}")
    }
    good = "\n" not in message and (argument in message or message in OTHERS) and "expected" in message
    good = (
        good and len(message) < 500 and (any(text in message for text in texts) or value in ((), "") or value is None)
    )
    return None if good else f"{argument}={shown(value)}: {message[:300]}"


@pytest.mark.parametrize("name", constructors())
def test_constructors(name, unchecked):
    cls = constructors()[name]
    arguments = valid_arguments(cls)
    cls(**arguments)
    complaints = []
    for argument in inspect.signature(cls).parameters:
        make = lambda value, a=argument: cls(**{**arguments, a: value})  # noqa: E731
        complaints += [complaint(make, argument, value) for value in HOSTILE]
    assert not [line for line in complaints if line], "\n".join(line for line in complaints if line)


def test_the_module(unchecked):
    mesh = make_mesh((2,), ("expert",))
    arguments = {
        "embed_dim": 4,
        "num_experts": 4,
        "router": TopK(2),
        "mesh": mesh,
        "experts": ExpertConfig(4),
        "rngs": nnx.Rngs(0),
    }
    complaints = []
    for argument in list(inspect.signature(MoE.__init__).parameters)[1:]:
        make = lambda value, a=argument: MoE(**{**arguments, a: value})  # noqa: E731
        # A function of another signature fails where it is called.
        is_function = argument in ("router", "kernel_init")
        complaints += [complaint(make, argument, value) for value in HOSTILE if not (is_function and callable(value))]
    assert not [line for line in complaints if line], "\n".join(line for line in complaints if line)


CONFIG = """
version: 1
cluster:
  levels: [{name: gpu, size: 2, rate: 10 GB/s}]
  gemm: {peak: 1 TFLOP/s, half_rows: 16}
  compute: 1 TFLOP/s
model: {layers: 1, hidden: 64, inner: 128, experts: 4, per_token: 2, tokens: 64}
system: ultraep
"""

TEXTS = ("nan", "inf", "-1", "0", "0.5", "2147483648", "9223372036854775808", "1e400", "", "----", "[1]", "None")
TEXTS += ("-" * 60_000, "9" * 5000, "x:y", "exact:eps=----", "ultraep:min_tokens=1e9", "\x1b[2J\n", "é")

ARGUMENTS = {
    "plan": ("counts.npy", "--balancer", "ultraep"),
    "replay": ("trace.npz", "--balancer", "ultraep"),
    "convert": ("trace.npz", "--out", "out.npz"),
    "drift": ("trace.npz", "--per-token", "2"),
    "simulate": ("config.yaml",),
    "advise": ("config.yaml", "config.yaml"),
    "calibrate": ("out.yaml", "--coordinator", "localhost:1234", "--processes", "2", "--process", "1"),
    "compile": ("--target", "h100:1x8"),
    "doctor": (),
}
"""Valid arguments of each command."""

LONG = {
    "advise": "jax_moe_lb.cli.advise.find",
    "calibrate": "jax.distributed.initialize",
    "compile": "jax_moe_lb.cli.compile.use_no_accelerators",
    "doctor": "jax_moe_lb.cli.app.diagnosis",
}
"""First function of each long command behind the checks of its arguments."""

COMMANDS = typer.main.get_command(app).commands


class Accepted(Exception):
    """The arguments of a long command were accepted."""


def accept(*args, **kwargs):
    raise Accepted


@pytest.mark.slow
@pytest.mark.parametrize(
    "texts", [TEXTS[::4], pytest.param(TEXTS, marks=pytest.mark.thorough)], ids=["some values", "all values"]
)
@pytest.mark.parametrize("name", COMMANDS)
def test_options_of_commands(name, texts, tmp_path, monkeypatch, capsys, unchecked):
    monkeypatch.chdir(tmp_path)
    counts = np.ones((2, 1, 2, 4), np.int32)
    np.save("counts.npy", counts[0, 0])
    np.savez("trace.npz", counts=counts, steps=np.arange(2))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(yaml.safe_load(CONFIG)))
    # Imported lazily by `simulate --png`.
    importlib.import_module("matplotlib.pyplot")
    if name in LONG:
        monkeypatch.setattr(LONG[name], accept)
        if name == "compile":
            monkeypatch.setattr(Target, "require_compiler", lambda self: None)
    complaints = []
    for parameter in COMMANDS[name].params:
        for text in texts:
            argv = with_value(name, parameter, text)
            if argv is not None:
                complaints.append(refusal(argv, parameter.opts[-1], capsys))
    assert not [line for line in complaints if line], "\n".join(line for line in complaints if line)


def with_value(name, parameter, text):
    """Return the arguments of a command with one replaced; `None` for flags."""
    argv, option = list(ARGUMENTS[name]), parameter.opts[-1]
    if parameter.param_type_name == "argument":
        position = [other.name for other in COMMANDS[name].params if other.param_type_name == "argument"]
        argv[position.index(parameter.name)] = text
        return [name, *argv]
    if getattr(parameter, "is_flag", False):
        return None
    if option in argv:
        argv[argv.index(option) + 1] = text
        return [name, *argv]
    return [name, *argv, f"{option}={text}"]


def refusal(argv, option, capsys):
    """Return the reason why a command neither ran nor refused its arguments in one line; `None` if it did."""
    case = " ".join(shown(word)[1:-1] for word in argv)
    start = time.process_time()
    try:
        code = main(argv)
    except Accepted:
        code = 0
    except BaseException as error:
        return f"{case}: {type(error).__name__}: {str(error)[:200]}"
    seconds, error = time.process_time() - start, capsys.readouterr().err
    if seconds > MOST_S:
        return f"{case} took {seconds:.0f} s"
    if code == 0:
        return None
    lines = error.splitlines()
    good = (
        code == 2
        and len(lines) == 1
        and lines[0].startswith("error: ")
        and len(error) < 600
        and error[:-1].isprintable()
    )
    return None if good else f"{case}: exit code {code}: {error[:300]}"
