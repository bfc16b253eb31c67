"""Every option acts, is refused, or is named by a warning; every parameter has a gradient, or a warning says why not.

Options come from signatures, and other values from annotations, so a new option takes part by itself. An option acts if
it changes an output, a gradient or a statistic of a layer on one device. An option of a transport may change the
lowered program of a layer on four devices instead.
"""

import dataclasses
import functools
import inspect
import typing
import warnings
from enum import Enum

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_moe_lb import (
    Buffers,
    Chain,
    ExpertConfig,
    Experts,
    Losses,
    MoE,
    MoEParams,
    MoEState,
    Precision,
    SharedExpert,
    System,
    TokenInfo,
    TopK,
    Topology,
    moe,
    plain,
    routing,
    transport,
)
from jax_moe_lb.balancers import Exact, RailS
from jax_moe_lb.core.stats import router_loss
from jax_moe_lb.kernels import relu_squared
from jax_moe_lb.nn import GradientResidual
from jax_moe_lb.routing import GroupLimit, Router
from jax_moe_lb.transport import (
    Codec,
    Direct,
    Dispatch,
    ExpertDomains,
    GatherExpertDomain,
    Once,
    QuantizedTransfer,
    Relay,
    Saved,
    hybrid_mesh,
)
from tests.layer_cases import make_mesh

pytestmark = pytest.mark.usefixtures("cpu_branches")

WIDTH, NUM_EXPERTS, NUM_TOKENS = 8, 8, 32
ONE_ROUND = plain(Buffers(max_rounds=1))
"""System without a loop over rounds, which takes three quarters of the compilation."""


def exported(module, base):
    values = [getattr(module, name) for name in module.__all__]
    return [v for v in values if inspect.isclass(v) and issubclass(v, base) and not inspect.isabstract(v)]


ROUTERS = [cls for cls in exported(routing, Router) if cls is not Router]
DISPATCHES = exported(transport, Dispatch)
OF_PROGRAM = [*DISPATCHES, System, Buffers, Saved, QuantizedTransfer, Codec]
CLASSES = [*ROUTERS, GroupLimit, Losses, ExpertConfig, SharedExpert, Precision, *OF_PROGRAM]

REQUIRED = {"num_experts_per_tok": 2, "router": TopK(2), "num_groups": 2, "top_groups": 1, "hidden_dim": 8}

VALUES = {
    "score": jax.nn.sigmoid,
    "group_limit": GroupLimit(2, 1),
    "router": TopK(3),
    "activation": relu_squared,
    "dtype": jnp.bfloat16,
    "param_dtype": jnp.bfloat16,
    "transfer_dtype": jnp.int8,
    "transfer": QuantizedTransfer(block=8),
    "balancer": Exact(),
    "replicate": Relay(),
    "dispatch": Once(),
    "capacity_factor": 0.25,
    ("QuantizedTransfer", "dtype"): jnp.int8,
    ("QuantizedTransfer", "block"): 64,
    ("Codec", "gradient_ratio"): 2.0,
}
"""Other values of options whose annotation gives none."""

CONTEXT = {
    ("TopK", "scale_inputs"): {"num_experts_per_tok": 1},
    ("NoisyTopK", "scale_inputs"): {"router": TopK(1)},
    ("ForceBalanced", "scale_inputs"): {"router": TopK(1)},
    ("ExpertChoice", "scale_inputs"): {"num_experts_per_tok": 1, "max_experts_per_tok": 1},
    ("ExpertChoice", "max_experts_per_tok"): {"num_experts_per_tok": 4},
    ("ExpertConfig", "activation"): {"gated": False},
    ("System", "replicate"): {"balancer": Exact(), "replica_slots": 1},
    ("Codec", "base"): {"ratio": 4.0},
}
"""Other options, without which an option has no effect."""

BY_PROGRAM = [("ExpertConfig", "fuse_gate_up"), ("Precision", "transfer_dtype")]
"""Options of other classes that keep all results."""

REFUSED = [
    *(("HashRouter", option) for option in ("selection_bias", "scale_inputs")),
    *((router, "selection_bias") for router in ("ExpertChoice", "ForceBalanced")),
    *(("TwoPhase", option) for option in ("saved", "transfer")),
]
"""Options of a base class without effect on a class."""


def others(name, kind, default):
    """Return values of an annotation besides the default."""
    if name in VALUES:
        return [VALUES[name]]
    if options := typing.get_args(kind):
        return [value for option in options for value in others(name, option, default)]
    if inspect.isclass(kind) and issubclass(kind, Enum):
        return [value for value in kind if value is not default]
    if kind is bool:
        return [value for value in (True, False) if value is not default]
    if kind in (int, float):
        return [(default or 0) + (1 if kind is int else 0.5), 2 * (default or 1)]
    if dataclasses.is_dataclass(kind):
        return [kind(**{option: value}) for option in kind.__annotations__ for value in values_of(kind, option)[:1]]
    return []


def values_of(cls, option):
    if option == "migrate":
        return [gathered(Codec())["system"].migrate]
    kind, default = typing.get_type_hints(cls)[option], inspect.signature(cls).parameters[option].default
    default = REQUIRED.get(option) if default is inspect.Parameter.empty else default
    return others((cls.__name__, option) if (cls.__name__, option) in VALUES else option, kind, default)


def made(cls, **options):
    required = [n for n, p in inspect.signature(cls).parameters.items() if p.default is inspect.Parameter.empty]
    return cls(**{name: REQUIRED[name] for name in required} | options)


def on_four_devices():
    mesh = make_mesh((2, 2), ("node", "gpu"))
    return mesh, Topology.from_mesh(mesh, ("node", "gpu"), ranks_per_domain=2, rails_per_node=2)


def gathered(codec):
    """Return the arguments of a layer with two expert domains of two ranks."""
    mesh, topology = on_four_devices()
    mesh = hybrid_mesh(mesh, {"node": 1, "gpu": 2})
    domains = ExpertDomains.from_mesh(mesh, topology)
    return {"mesh": mesh, "topology": domains.between, "system": System(migrate=GatherExpertDomain(domains, codec))}


def arguments_of(value):
    """Return the arguments of `MoE` with an object."""
    if isinstance(value, Codec):
        return gathered(value)
    if isinstance(value, System) and value.migrate:
        return gathered(Codec()) | {"system": value}
    if isinstance(value, Dispatch):
        balancer = Chain((Exact(), RailS())) if isinstance(value, transport.MultiRailDispatch) else Exact()
        return {"system": System(balancer, dispatch=value, replica_slots=1)}
    if isinstance(value, Buffers | Saved | QuantizedTransfer):
        name = {Buffers: "buffers", Saved: "saved", QuantizedTransfer: "transfer"}[type(value)]
        return arguments_of(Direct(**{name: value}))
    names = {GroupLimit: "router", Losses: "losses", ExpertConfig: "experts", SharedExpert: "shared"}
    names |= {Precision: "precision", System: "system"} | dict.fromkeys(ROUTERS, "router")
    return {names[type(value)]: TopK(2, group_limit=value) if isinstance(value, GroupLimit) else value}


def step(width=WIDTH, **arguments):
    """Return the function from parameters and tokens to outputs, statistics and gradients, and its arguments."""
    given = {"router": TopK(2), "experts": ExpertConfig(8), "rngs": nnx.Rngs(0)} | arguments
    layer = MoE(width, NUM_EXPERTS, **given)
    if layer.bias is not None:
        layer.bias[...] = jnp.linspace(-0.2, 0.2, NUM_EXPERTS)
    graph, params, rest = nnx.split(layer, nnx.Any(nnx.Param, GradientResidual), ...)

    def loss(params, x):
        tokens = {"token_ids": jnp.arange(NUM_TOKENS).reshape(x.shape[:2]), "key": jax.random.key(0)}
        y, stats = nnx.merge(graph, params, rest, copy=True)(x, **tokens)
        return jnp.square(y.astype(jnp.float32)).sum() + router_loss(stats), (y, stats)

    x = jax.random.normal(jax.random.key(1), (4, NUM_TOKENS // 4, width))
    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True)), params, x


def results(value):
    """Return outputs, statistics and gradients on one device; require a gradient of every parameter or a warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run, params, x = step(mesh=make_mesh((1,), ("expert",)), system=ONE_ROUND, **arguments_of(value))
    out = run(params, x)
    gradients = nnx.to_pure_dict(out[1][0])
    without = [name for name, leaf in gradients.items() if not np.any(np.asarray(leaf))]
    assert not without or any("gradient" in str(one.message) for one in caught), f"no gradient of {without}"
    return jax.tree.map(lambda leaf: np.asarray(leaf).tobytes(), out)


def program(value):
    """Return the lowered program on four devices."""
    mesh, topology = on_four_devices()
    # Blocks of quantized rows have 128 numbers by default.
    width = 128 if isinstance(value, Precision | QuantizedTransfer) else WIDTH
    run, params, x = step(width, **{"mesh": mesh, "topology": topology} | arguments_of(value))
    return run.lower(params, x).as_text()


@functools.cache
def observed(value, by_program):
    return program(value) if by_program else results(value)


def outcome(cls, option, value):
    """Return "acts", "refused", "warned" or "silent" for an option with another value."""
    context = CONTEXT.get((cls.__name__, option), {})
    by_program = cls in OF_PROGRAM or (cls.__name__, option) in BY_PROGRAM
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = observed(made(cls, **context | {option: value}), by_program)
        except (TypeError, ValueError) as error:
            if option not in str(error):
                raise
            return "refused"
    if found != observed(made(cls, **context), by_program):
        return "acts"
    return "warned" if any(option in str(one.message) for one in caught) else "silent"


def options():
    """Yield every option of every class; those inherited by a router or a dispatch are further cases of its base."""
    for cls in CLASSES:
        for option in inspect.signature(cls).parameters:
            marks = pytest.mark.thorough if is_further_case(cls, option) else ()
            yield pytest.param(cls, option, marks=marks, id=f"{cls.__name__}-{option}")


def is_further_case(cls, option):
    inherits = issubclass(cls, Router | Dispatch) and option not in vars(cls).get("__annotations__", {})
    return inherits and cls not in (TopK, Direct) and (cls.__name__, option) not in REFUSED


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "option"), list(options()))
def test_every_option(cls, option):
    values = values_of(cls, option)
    assert values, "no other value; expected one in VALUES"
    want = "refused" if (cls.__name__, option) in REFUSED else "acts"
    found = {}
    for value in values:
        found[str(value)] = outcome(cls, option, value)
        if found[str(value)] == want:
            return
    raise AssertionError(f"{option}: {found}; expected {want}")


def of_module():
    """Return another value of each option of `MoE`."""
    mesh = make_mesh((2, 2), ("data", "expert"))
    return {
        "topology": Topology.from_mesh(mesh, ranks_per_domain=1),
        "system": "plain",
        "shared": SharedExpert(8),
        "losses": Losses(z=1.0),
        "precision": Precision(jnp.bfloat16),
        "kernel_init": nnx.initializers.zeros,
        "rules": (("exp", "expert"), ("embed", "data"), ("mlp", None)),
    }


@functools.cache
def module_with(option):
    """Return the program and the initial parameters of a layer with another value of an option, or of none."""
    changed = {option: of_module()[option]} if option else {}
    run, params, x = step(mesh=make_mesh((2, 2), ("data", "expert")), **changed)
    return run.lower(params, x).as_text(), jax.tree.map(lambda leaf: np.asarray(leaf).tobytes(), params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "option",
    [n for n, p in inspect.signature(MoE.__init__).parameters.items() if p.default is not inspect.Parameter.empty],
)
def test_every_option_of_the_module(option):
    assert module_with(option) != module_with(None)


FIELDS = {
    "logit_bias": np.ones(NUM_EXPERTS, np.float32),
    "selection_bias": np.ones(NUM_EXPERTS, np.float32),
    "homes": np.arange(NUM_EXPERTS, dtype=np.int32)[::-1].copy(),
    "mask": np.arange(NUM_TOKENS // 2) % 3 > 0,
    "ids": np.arange(NUM_TOKENS // 2, dtype=np.int32),
    "key": 0,
    "segments": np.arange(NUM_TOKENS // 2, dtype=np.int32) // 4,
    "num_segments": NUM_TOKENS // 8,
    "position": np.arange(NUM_TOKENS // 2, dtype=np.int32)[::-1].copy(),
    "experts": np.stack([np.arange(NUM_TOKENS // 2, dtype=np.int32) % 2, np.full(NUM_TOKENS // 2, 2, np.int32)], 1),
    "weights": np.ones((NUM_TOKENS // 2, 2), np.float32),
}
"""Values of the optional fields of the arguments of `moe`."""

READ_BY = {"ids": {"router": routing.HashRouter(2)}, "key": {"router": routing.NoisyTopK()}}
READ_BY |= {name: {"losses": Losses(sequence=0.1)} for name in ("segments", "num_segments")}
READ_BY |= {"position": {"router": routing.ForceBalanced(TopK(2))}}
"""Other arguments, for fields read by some routers or losses."""

BESIDE = {"segments": "num_segments", "num_segments": "segments", "weights": "experts"}
"""Fields required beside others."""

SET_BY_LAYER = {"balancer"}
"""Fields that `moe` or a balancer sets."""


def functional(fields, router=TopK(2), losses=Losses()):
    mesh = make_mesh((2,), ("expert",))
    ranks, whole = jax.sharding.PartitionSpec("expert"), jax.sharding.PartitionSpec()

    def some(cls):
        # Only optional fields: `MoEParams.experts` are weights.
        names = {field.name for field in dataclasses.fields(cls) if field.default is not dataclasses.MISSING}
        values = {name: jax.random.key(value) if name == "key" else value for name, value in fields.items()}
        return {n: v if n == "num_segments" else jnp.asarray(v) for n, v in values.items() if n in names}

    def one_rank(x, kernel, up, down):
        params, state = MoEParams(kernel, Experts(up, down), **some(MoEParams)), MoEState(**some(MoEState))
        info = TokenInfo(**some(TokenInfo))
        y, stats, _ = moe(x, params, router, System(Exact()), Topology.from_mesh(mesh), state, info, losses)
        return y, stats.of_group

    specs = (ranks, whole, ranks, ranks)
    run = jax.shard_map(one_rank, mesh=mesh, in_specs=specs, out_specs=(ranks, jax.sharding.PartitionSpec(None)))
    shapes = ((NUM_TOKENS, WIDTH), (WIDTH, NUM_EXPERTS), (NUM_EXPERTS, WIDTH, 8), (NUM_EXPERTS, 8, WIDTH))
    return jax.jit(run).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).as_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "field",
    [
        field.name
        for cls in (MoEParams, MoEState, TokenInfo)
        for field in dataclasses.fields(cls)
        if field.name not in SET_BY_LAYER and field.default is not dataclasses.MISSING
    ],
)
def test_every_field_of_the_function(field):
    context = READ_BY.get(field, {})
    others = {name: FIELDS[name] for name in (BESIDE.get(field),) if name is not None}
    try:
        without = functional(others, **context)
    except ValueError as error:
        # The field is required here.
        without = str(error)
    assert functional({field: FIELDS[field], **others}, **context) != without
