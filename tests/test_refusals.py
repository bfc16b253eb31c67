"""Every public constructor and command line option accepts a wrong value or refuses it in one line, within seconds.

The cases are generated from signatures, so new classes, commands and options take part by themselves.
"""

import dataclasses
import importlib
import inspect
import re
import time
import typing
from enum import Enum
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
import yaml
from flax import nnx
from jax.sharding import PartitionSpec

from jax_moe_lb import (
    ExpertConfig,
    Experts,
    Losses,
    MoE,
    MoEParams,
    MoEState,
    Precision,
    TokenInfo,
    TopK,
    Topology,
    balance,
    balancers,
    core,
    kernels,
    layer,
    moe,
    nn,
    raise_on_fault,
    router_loss,
    routing,
    sim,
    systems,
    transport,
    use_virtual_cpu_devices,
)
from jax_moe_lb.aot import LayerSizes, Target
from jax_moe_lb.cli import main
from jax_moe_lb.cli.app import app
from jax_moe_lb.core.checks import shown
from jax_moe_lb.sim import Links
from jax_moe_lb.transport import ExpertDomains
from tests.layer_cases import make_mesh
from tests.marks import parametrize

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
    texts = (shown(value), str(value)[:200], repr(value)[:200], f"{getattr(value, '__name__', 'x')}")
    names_value = any(text[:20] in message for text in texts) or value in ((), "") or value is None
    names_argument = argument in message or message in OTHERS
    good = names_argument and names_value and "\n" not in message and "expected" in message and len(message) < 500
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
    arguments = {"embed_dim": 4, "num_experts": 4, "router": TopK(2), "mesh": mesh}
    arguments |= {"experts": ExpertConfig(4), "rngs": nnx.Rngs(0)}
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
    "tune": ("--target", "h100:1x8"),
    "doctor": (),
}
"""Valid arguments of each command."""

LONG = {
    "advise": "jax_moe_lb.cli.advise.find",
    "calibrate": "jax.distributed.initialize",
    "compile": "jax_moe_lb.cli.compile.use_no_accelerators",
    "tune": "jax_moe_lb.cli.compile.use_no_accelerators",
    "doctor": "jax_moe_lb.cli.app.diagnosis",
}
"""First function of each long command behind the checks of its arguments."""

COMMANDS = typer.main.get_command(app).commands


class Accepted(Exception):
    """The arguments of a long command were accepted."""


def accept(*args, **kwargs):
    raise Accepted


@pytest.mark.slow
@parametrize("texts", [TEXTS[::4]], [TEXTS], ids=["some values", "all values"])
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
        if name in ("compile", "tune"):
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
    is_line = error.startswith("error: ") and len(error.splitlines()) == 1 and error[:-1].isprintable()
    good = code == 2 and is_line and len(error) < 600
    return None if good else f"{case}: exit code {code}: {error[:300]}"


def a_layer(**changes):
    sizes = {"embed_dim": 8, "num_experts": 16, "router": TopK(2), "experts": ExpertConfig(4)}
    return MoE(**{**sizes, "mesh": make_mesh((4,), ("expert",)), "rngs": nnx.Rngs(0), **changes})


def a_call(**changes):
    """Call `nn.MoE` with 64 tokens."""
    router = changes.pop("router", TopK(2))
    return a_layer(router=router)(**{"x": jnp.ones((64, 8)), **changes})


def a_rank(in_specs=PartitionSpec("expert"), around=True, **changes):
    """Trace `moe` inside of `jax.shard_map`, with 16 tokens on each of 2 x 2 devices."""
    mesh = make_mesh((2, 2), ("expert", "tensor"))
    whole = PartitionSpec()
    experts = Experts(jnp.ones((4, 8, 4)), jnp.ones((4, 4, 8)))
    topology = Topology.from_mesh(mesh, "expert", tensor_axes="tensor")
    arguments = {"router": TopK(2), "system": systems.exact(), "topology": topology}

    def one_rank(x, kernel, experts):
        # Made here, without the annotation checks of the tests.
        made = {name: make() for name, make in changes.items() if name in ("params", "tokens")}
        return moe(**{"x": x, **arguments, "params": MoEParams(kernel, experts), **changes, **made})[0]

    args = jnp.ones((32, 8)), jnp.ones((8, 4)), experts
    if not around:
        # Such a call usually has the experts of all ranks; the error names the call.
        return one_rank(*args)
    specs = (in_specs, whole, PartitionSpec("expert"))
    return jax.eval_shape(jax.shard_map(one_rank, mesh=mesh, in_specs=specs, out_specs=in_specs), *args)


def with_experts(dtype=jnp.float32, kernel=(8, 4), **shapes):
    """Return the parameters of a rank with arrays of other shapes."""
    shapes = {"up": (2, 8, 4), "down": (2, 4, 8)} | shapes
    return MoEParams(jnp.ones(kernel), Experts(**{name: jnp.ones(shape, dtype) for name, shape in shapes.items()}))


@dataclasses.dataclass
class Unhashable:
    """Router that is compared by fields, and not frozen."""

    def __call__(self, logits, bias, info):
        return TopK(2)(logits, bias, info)


def routed(experts):
    """Return a router of given experts."""
    return lambda x, b, i: routing.Routing(experts, jnp.ones(experts.shape), x, x)


def split(embed, mlp):
    """Return a mesh and the rules of a layer."""
    return {"mesh": FSDP, "rules": (("exp", "expert"), ("embed", embed), ("mlp", mlp))}


def planned(counts, slots=None):
    return core.plain_plan(counts, Topology.flat(2), slots)


COUNTS = np.ones((2, 4), np.int32)
TWO, FOUR = (make_mesh((size,), ("expert",)) for size in (2, 4))
FSDP, OTHER = (make_mesh((2, 2), ("data", name)) for name in ("expert", "ep"))
LINEAR = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
PAIRS = jnp.ones((64, 2), jnp.int32)
ROUTERS = [TopK(17), routing.ForceBalanced(TopK(17)), routing.NoisyTopK(TopK(17)), routing.HashRouter(17)]
ROUTERS += [routing.ExpertChoice(17, 20), TopK(9, group_limit=routing.GroupLimit(2, 1))]
"""Routers of more experts than there are."""

SHAPES = [("down", shape) for shape in ((2, 8, 4), (2, 4, 9), (3, 4, 8))]
SHAPES += [("gate", (2, 8, 3)), ("up_bias", (2, 3)), ("down_bias", (3, 8))]
"""Wrong shapes of arrays of experts."""

REFUSED = [
    *((partial(a_layer, router=router), "router.num_experts_per_tok is ") for router in ROUTERS),
    (partial(a_layer, router=TopK(1, group_limit=routing.GroupLimit(3, 1))), "router.num_g"),
    (partial(a_layer, router=lambda x: x), "router is <function"),
    (partial(a_layer, router=TopK), "router is the class TopK; expected an instance"),
    (partial(a_layer, router=2), "router is 2; expected a function"),
    (partial(a_layer, router=Unhashable()), "router is Unhashable(); expected a hashable function"),
    (partial(a_call, router=lambda x, b, i: x), "router returned "),
    (partial(a_call, router=routed(jnp.zeros((1, 1), int))), "router's experts has shape (1, 1); expected [16, any]"),
    (partial(a_call, router=routed(jnp.zeros((16, 1)))), "router's experts has dtype float32; expected integers"),
    (partial(a_call, x=[[1.0] * 8]), "x is [[1.0, 1.0, 1.0, 1.0, 1.0, 1.0"),
    (partial(a_call, x=None), "x is None; expected an array"),
    (partial(a_call, x=jnp.ones((64, 7))), "x has shape (64, 7); expected [..., 8]"),
    (partial(a_call, x=jnp.ones((64, 8), int)), "x has dtype int32; expected floating-point numbers"),
    (partial(a_call, mask=jnp.ones(63, bool)), "mask has shape (63,); expected [64]"),
    (partial(a_call, mask=jnp.ones((64, 1), bool)), "mask has shape (64, 1); expected [64]"),
    (partial(a_call, mask=jnp.ones(64)), "mask has dtype float32; expected booleans"),
    (partial(a_call, mask=jnp.ones(64, int)), "mask has dtype int32; expected booleans"),
    (partial(a_call, mask=[True] * 64), "mask is [True, True"),
    (partial(a_call, token_ids=jnp.ones(63, int)), "token_ids has shape (63,); expected [64]"),
    (partial(a_call, token_ids=jnp.ones(64)), "token_ids has dtype float32; expected integers"),
    (partial(a_call, experts=[[0, 1]] * 64), "experts is [[0, 1], [0, 1]"),
    (partial(a_call, experts=jnp.ones((64, 2))), "experts has dtype float32; expected integers"),
    (partial(a_call, experts=jnp.ones((63, 2), int)), "experts has shape (63, 2); expected [64, K]"),
    (partial(a_call, experts=jnp.ones((64, 3), int)), "experts has K = 3; expected 2, as the router"),
    (partial(a_call, experts=PAIRS, weights=jnp.ones(64)), "weights has shape (64,); expected [64, K]"),
    (partial(a_call, key=0), "key is 0; expected a random key"),
    (partial(a_call, key=jnp.ones(2)), "key is Array"),
    (partial(a_call, key=jax.random.split(jax.random.key(0), 2)), "key is Array"),
    (partial(a_call, segments=jnp.ones(64), num_segments=1), "segments has dtype float32; expected integers"),
    (
        partial(a_call, experts=(PAIRS - 2).astype("uint32")),
        "expert ids of rank 0 include 2147483647 (32 bad ones); expected 0 to 15",
    ),
    (partial(a_layer, topology=Topology.flat(4)), "topology has no expert_axes; expected one made by"),
    (
        partial(a_layer, topology=Topology.from_mesh(OTHER, "ep")),
        "topology names axis 'ep'; expected an axis of the mesh",
    ),
    (
        partial(a_layer, topology=Topology.from_mesh(TWO)),
        "topology has 2 ranks; expected the 4 of mesh axes ('expert',)",
    ),
    (
        partial(a_layer, embed_dim=7, **split("data", None)),
        "rules split axis 'embed' of size 7 over ('data',); expected a multiple of 2",
    ),
    (
        partial(a_layer, experts=ExpertConfig(7), **split(None, "data")),
        "rules split axis 'mlp' of size 7 over ('data',); expected a multiple of 2",
    ),
    (partial(a_layer, **split(3, None)), "rules has ('embed', 3); expected pairs of a logical"),
    (
        partial(a_layer, mesh=OTHER),
        "mesh has the axes ('data', 'ep'); expected the axis 'expert', or topology=Topology.from_mesh(mesh, 'ep') with",
    ),
    (partial(a_rank, around=False), "topology has the axes ('expert', 'tensor'); expected axes of"),
    (partial(a_rank, topology=Topology.flat(2)), "topology has no expert_axes; expected one"),
    (partial(a_rank, x=[1.0]), "x is [1.0]; expected an instance of Array"),
    (partial(a_rank, system="exact"), "system is 'exact'; expected an instance of System"),
    (partial(a_rank, params=lambda: jnp.ones((8, 4))), "params is "),
    (partial(a_rank, tokens=lambda: jnp.ones(16, bool)), "tokens is "),
    (
        partial(a_rank, params=partial(with_experts, kernel=(8, 6))),
        "experts holds 2 experts on each of 2 ranks; expected 6 in all",
    ),
    (
        partial(a_rank, params=partial(with_experts, up=(2, 5, 4), down=(2, 4, 5))),
        "x has width 8 and experts.up 5; expected 8, as in the router's kernel",
    ),
    *(
        (partial(a_rank, params=partial(with_experts, **{name: shape})), f"params.experts.{name} has shape {shape}; e")
        for name, shape in SHAPES
    ),
    (
        partial(a_rank, params=partial(with_experts, jnp.bfloat16)),
        "params.experts.up has dtype bfloat16; expected float32, as x",
    ),
    (partial(a_rank, x=jnp.ones((2, 8, 8))), "x has shape (2, 8, 8); expected [T, H]"),
    (partial(a_rank, x=jnp.ones((16, 8), "float16")), "x has dtype float16; expected bfloat16, float32 or float64"),
    (partial(a_rank, tokens=lambda: TokenInfo(jnp.ones(15, bool))), "tokens.mask has shape (15,); expected [16"),
    (partial(a_rank, tokens=lambda: TokenInfo(jnp.ones(16))), "tokens.mask has dtype float32; expected bool"),
    (partial(a_rank, tokens=lambda: TokenInfo(position=jnp.ones(15, int))), "tokens.position has shape (15,); expect"),
    (partial(a_rank, tokens=lambda: TokenInfo(segments=jnp.ones(15, int))), "tokens.segments has shape (15,); expect"),
    (partial(a_rank, tokens=lambda: TokenInfo(num_segments=-1)), "tokens.num_segments is -1; expected"),
    (partial(a_rank, tokens=lambda: TokenInfo(ids=jnp.ones(16))), "tokens.ids has dtype float32; expected"),
    (partial(a_rank, state=MoEState(homes=jnp.arange(8))), "state.homes has shape (8,); expected [4]"),
    (partial(a_rank, router=TopK(5)), "router.num_experts_per_tok is 5; expected at most 4"),
    (
        partial(a_rank, router=TopK(2, selection_bias=True)),
        "params.selection_bias is None; expected [E], as router.selection_bias is True",
    ),
    (
        partial(a_rank, router=TopK(2, logit_bias=True)),
        "params.logit_bias is None; expected [E], as router.logit_bias is True",
    ),
    (
        partial(a_rank, in_specs=PartitionSpec(("expert", "tensor"))),
        "x differs between shards of ['tensor']; expected equal tokens",
    ),
    (lambda: Topology.from_mesh(8), "mesh is 8; expected an instance of Mesh"),
    (lambda: Topology.flat("8"), "num_ranks is '8'; expected an integer"),
    (lambda: use_virtual_cpu_devices("8"), "num_devices is '8'; expected an integer"),
    (lambda: ExpertConfig(8, jax.nn.silu), "experts.activation is <PjitFunction of"),
    (partial(planned, COUNTS * 0.5), "counts has dtype float64; expected integers"),
    (partial(planned, COUNTS > 0), "counts has dtype bool; expected integers"),
    (partial(planned, COUNTS.tolist()), "counts is [[1, 1, 1, 1], [1, 1, 1, 1]]; expected an array"),
    (partial(planned, COUNTS[:1]), "counts has shape (1, 4); expected [R, E] with R = 2"),
    (lambda: core.traffic(planned(COUNTS), COUNTS * 0.5), "counts has dtype float64; expected"),
    (lambda: core.check_plan(planned(COUNTS), COUNTS * 0.5), "counts has dtype float64"),
    (lambda: raise_on_fault(None), "stats is None; expected an instance of Stats"),
    (lambda: router_loss(jnp.ones(2)), "stats is Array([1., 1.], dtype=float32); expected an inst"),
    (lambda: core.needs_more_rounds(None), "stats is None; expected an instance of Stats"),
    (lambda: a_layer(system=systems.two_tier()).update_loads(None), "stats is None; expected an"),
    (lambda: a_layer(router=TopK(2, selection_bias=True)).update_bias(None), "stats is None; expected"),
    (lambda: balance(None, mesh=TWO), "model is None; expected an instance"),
    (lambda: balance(jnp.sin, mesh=TWO), "model is <"),
    (lambda: balance(LINEAR, mesh=None), "mesh is None; expected"),
    (
        lambda: balance(LINEAR, mesh=TWO),
        "model is a Linear without MoE blocks; expected one or more of maxtext.layers.moe.RoutedMoE, easydel.",
    ),
    (lambda: balance(a_layer(), mesh=FOUR), "model is a MoE without"),
    (
        lambda: balance(a_layer(), mesh=FOUR, topology=Topology.flat(4)),
        "topology has no expert_axes; expected one made by Topology.from_mesh(mesh)",
    ),
    (lambda: core.nearest_first(COUNTS, planned(COUNTS).quota, 2, 2), "rank is 2; expected 0 to 1"),
    (lambda: core.nearest_first(COUNTS, planned(COUNTS).quota, 0, 3), "domain is 3; expected a divisor of the 2 ranks"),
    (partial(Topology.from_mesh, None), "mesh is None; expected an instance of Mesh"),
    (partial(Topology.from_mesh, FSDP, 3), "expert_axis is 3; expected names of mesh axes"),
    (partial(Topology.from_mesh, FSDP, bytes_per_s=1e9), "bytes_per_s is 1000000000.0; expected one number per expert"),
    (partial(systems.system_named, 3), "system is 3; expected a string"),
    (lambda: systems.exact(dispatch=3), "dispatch is 3; expected an instance of Dispatch"),
    (lambda: systems.exact(dispatch=transport.Once), "dispatch is <class"),
    (lambda: systems.exact(2, 1.25), "buffers is 1.25; expected an instance of Buffers"),
]
"""Calls with a wrong argument, and the beginning of their error."""


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_arguments_of_functions(call, message, unchecked):
    with pytest.raises((TypeError, ValueError)) as refused:
        call()
    text = str(refused.value)
    assert text.startswith(message)
    assert "; expected " in text
    assert "\n" not in text
    assert len(text) < 500


@pytest.mark.parametrize(
    ("system", "remedy"),
    [
        (balancers.Exact(), "Pass System(Exact(), replica_slots=2)."),
        (systems.exact, "Call the function, as in exact()."),
        (None, "an instance of System or a string"),
    ],
)
@pytest.mark.parametrize("take", [a_layer, partial(balance, LINEAR, mesh=FSDP)])
def test_an_object_beside_a_system_is_refused_with_the_remedy(take, system, remedy, unchecked):
    with pytest.raises(TypeError, match=f"^system is .*; expected .*{re.escape(remedy)}$"):
        take(system=system)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float8_e4m3fn])
def test_a_dtype_is_refused_with_transfers_as_remedy_if_it_has_eight_bits(dtype):
    with pytest.raises(ValueError, match=r"^precision.dtype is float.*; expected bfloat16, float32 or") as refused:
        Precision(dtype)
    assert ("Pass transfer_dtype" in str(refused.value)) == (jnp.dtype(dtype).itemsize == 1)


NO_TOKENS = [((0, 8), None), ((4, 0, 8), routing.GroupLimit(2, 1)), ((0, 16, 8), None)]


@pytest.mark.slow
@parametrize("case", NO_TOKENS[:2], NO_TOKENS)
def test_a_batch_without_tokens_has_no_loss(case):
    shape, limit = case
    router, losses = TopK(2, group_limit=limit), Losses(switch=1.0, sequence=1.0, z=1.0)
    # The loss of sequences requires them.
    losses = losses if len(shape) > 2 else Losses(switch=1.0, z=1.0)
    y, stats = a_layer(router=router, losses=losses)(jnp.ones(shape))
    assert y.shape == shape
    assert float(router_loss(stats)) == 0
    assert int(stats.counts.sum()) == 0
