"""Random layers drawn from the signatures of the public classes: an option without values is an error."""

import inspect
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh

from jax_moe_lb import (
    Buffers,
    Chain,
    ExpertConfig,
    HostCallback,
    Losses,
    MoE,
    Plan,
    Precision,
    SharedExpert,
    System,
    TopK,
    Topology,
    kernels,
    transport,
)
from jax_moe_lb.balancers import RailS
from jax_moe_lb.balancers.host_callback import PlannedOnHost
from jax_moe_lb.contrib import LPLB
from jax_moe_lb.layer.systems import system_names
from jax_moe_lb.routing import GroupLimit
from jax_moe_lb.transport import (
    CopyDispatch,
    Direct,
    ExpertDomains,
    Forward,
    GatherExpertDomain,
    MultiRailDispatch,
    PeerCopy,
    QuantizedTransfer,
    Replicate,
    Saved,
    hybrid_mesh,
)
from tests.balancers.fields import draw_balancer
from tests.oracle import random_plan
from tests.stress.places import PLACES, Place
from tests.test_options import DISPATCHES, REFUSED, ROUTERS, exported, values_of

REPLICATIONS = exported(transport, Replicate)
ACTIVATIONS = ["default", *(name for name in kernels.__all__ if name != "Experts")]
NAMED = [cls.__name__ for cls in (*ROUTERS, *DISPATCHES, *REPLICATIONS)] + ACTIVATIONS + list(system_names())
"""Parts of which each is in a layer."""
DRAWN = [MoE, Topology.from_mesh, *ROUTERS, *DISPATCHES, *REPLICATIONS, Buffers, Saved, QuantizedTransfer, GroupLimit]
DRAWN += [System, ExpertConfig, SharedExpert, Losses, Precision]
"""Classes and functions whose options are drawn."""

UNDRAWN = {
    "rngs": "the seed of each layer",
    "migrate": "drawn with the mesh",
    "transfer_dtype": "as the transfer of the dispatch, with blocks of 128",
    "site": "a name in messages",
}
"""Options with a constant value or drawn together with another one, with the reason."""

DTYPES = [
    ("float64", None, "float32"),
    ("float64", None, "float64"),
    ("float64", "float64", "float64"),
    ("float64", "float32", "float32"),
    ("float32", None, "float32"),
    ("float32", "float32", "float32"),
    ("float32", "bfloat16", "float32"),
    ("bfloat16", None, "float32"),
    ("bfloat16", "bfloat16", "bfloat16"),
]
"""Dtypes of tokens, arithmetic and parameters."""


def parameters_of(function: Any) -> dict[str, inspect.Parameter]:
    # The metaclass of Flax modules hides the signature of the class.
    found = inspect.signature(MoE.__init__ if function is MoE else function).parameters
    return {name: parameter for name, parameter in found.items() if name != "self"}


@dataclass
class Draw:
    """Random choices of one layer, its options with a drawn value, and the names of its parts."""

    seed: int
    rng: np.random.Generator
    changed: set[tuple[str, str]] = field(default_factory=set)
    parts: set[str] = field(default_factory=set)

    def one(self, values: list) -> Any:
        return values[self.rng.integers(len(values))]

    def spread(self, name: str, values: list) -> Any:
        """Return a value; consecutive seeds have all of them."""
        block, at = divmod(self.seed, len(values))
        order = np.random.default_rng([zlib.crc32(name.encode()), block]).permutation(len(values))
        return values[order[at]]

    def options(self, function: Any, choices: dict[str, list], **given: Any) -> Any:
        """Call a class or function; half of its options keep their default."""
        name = getattr(function, "__qualname__", "")
        for option, parameter in parameters_of(function).items():
            required = parameter.default is inspect.Parameter.empty
            if option in given or (option in UNDRAWN and not required) or (not required and self.rng.random() < 0.5):
                continue
            values = choices[option] if option in choices else values_of(function, option)
            if not values:
                raise AssertionError(f"{name}.{option} has no values to draw")
            given[option] = self.one(values)
        self.changed |= {(name, option) for option in given}
        self.parts.add(name)
        return function(**given)


ROUTER_CHOICES = {
    "max_experts_per_tok": [3, 4],
    "score": [jax.nn.sigmoid, jax.nn.softmax],
    "capacity_factor": [0.5, 1.0],
    "scale": [0.5, 2.0],
    "std": [0.5],
}
COSTS = {"bytes_per_s": [None], "latency_s": [None], "flops_per_s": [1e12]}
ROUNDS = ((0.3, None), (0.7, None), (1.05, None), (4.0, 2), (8.0, 1))
"""Headrooms with sufficient limits of rounds, if all tokens go to one of eight ranks."""
TRANSPORT_CHOICES = {
    "chunks": [2],
    "moved_headroom": [2.0],
    "max_nodes": [2],
    "timeout_s": [60.0],
    "chunk_bytes": [64],
    "copies": [PeerCopy(chunk_bytes=64)],
    "min_replicas": [2],
    "min_gain": [1],
    "replicas": [True],
    "rows": [True],
}


def of_class(cls: type, choices: dict[str, list]) -> dict[str, list]:
    """Remove the values refused by a class."""
    return choices | {option: [parameters_of(cls)[option].default] for of, option in REFUSED if of == cls.__name__}


def draw_router(draw: Draw, num_experts: int) -> Any:
    # Scaled inputs require one expert per token.
    one = draw.rng.random() < 0.3
    choices = ROUTER_CHOICES | {"scale_inputs": [one], "num_experts_per_tok": [1, 2, 3, 1, 2, 3, num_experts]}
    choices |= {"num_experts_per_tok": [1], "max_experts_per_tok": [1]} if one else {}

    def group_limit() -> Any:
        return draw.options(GroupLimit, {"num_groups": [2, 4], "top_groups": [1, 2], "experts_per_score": [1, 2]})

    def top_k() -> TopK:
        return draw.options(TopK, {**choices, "group_limit": [group_limit()]})

    # Half of the layers have the router that the reference implements.
    cls = draw.spread("router", [TopK] * len(ROUTERS) + ROUTERS)
    return top_k() if cls is TopK else draw.options(cls, of_class(cls, {**choices, "router": [top_k()]}))


def any_legal_plan(counts: np.ndarray, plan: Plan, topology: Topology) -> Plan:
    """Return a random plan as a function of the counts; the layer must serve any legal plan."""
    rng = np.random.default_rng(zlib.crc32(np.ascontiguousarray(counts).tobytes()))
    placement, quota = random_plan(rng, counts, plan.placement.shape[1], plan.domain)
    return replace(plan, placement=placement, quota=quota)


def draw_system(draw: Draw, cls: type, place: Place, width: int, migrate: GatherExpertDomain | None) -> System | str:
    name = draw.spread("system", [*system_names(), *[""] * 2 * len(system_names())])
    if name and migrate is None:
        draw.parts.add(name)
        return name
    whole = TRANSPORT_CHOICES if cls in (Direct, CopyDispatch) else TRANSPORT_CHOICES | {"chunks": [1]}
    headroom, max_rounds = draw.spread("rounds", list(ROUNDS))
    buffers = draw.options(Buffers, whole, headroom=headroom, max_rounds=max_rounds)
    saved = draw.options(Saved, whole)
    # Partial sums of tensor shards are quantized one by one, and not as in the reference.
    quantizes = width % 4 == 0 and not place.tensor_axes
    transfer = draw.options(
        QuantizedTransfer, {"dtype": [jnp.int8, jnp.float8_e4m3fn]}, block=draw.one([4, width - width % 4])
    )
    given = {**whole, "buffers": [buffers], "saved": [saved], "transfer": [transfer if quantizes else None]}
    dispatch = draw.options(cls, of_class(cls, given))
    any_plan = HostCallback(any_legal_plan)
    balancer = any_plan if draw.rng.random() < 0.3 else draw_balancer(draw.rng, ("domain_size", "speeds"))
    balancer = Chain((balancer, RailS())) if cls is MultiRailDispatch else balancer
    replicate = draw.options(draw.spread("replicate", REPLICATIONS), TRANSPORT_CHOICES)
    choices = {"replicate": [replicate], "replica_slots": [1, 2, 4], "relocates": [True]}
    return draw.options(System, choices, balancer=balancer, dispatch=dispatch, migrate=migrate)


def draw_experts(draw: Draw, place: Place) -> ExpertConfig:
    name = draw.spread("activation", ACTIVATIONS)
    # The derivative jumps at the limits of a clamp, and bfloat16 moves many arguments across.
    if name == "ClampedSwiGLU" and "bfloat16" in draw.spread("dtypes", DTYPES):
        name = "default"
    draw.parts.add(name)
    activation = None if name == "default" else getattr(kernels, name)
    activation = activation() if inspect.isclass(activation) else activation
    gated = draw.one([True, False]) if activation is None else len(inspect.signature(activation).parameters) == 2
    choices = {"hidden_dim": [2, 8, 12] if place.mlp else [1, 3, 8, 16, 33], "fuse_gate_up": [gated]}
    return draw.options(ExpertConfig, choices, activation=activation, gated=gated)


def draw_mesh(
    draw: Draw, dispatch: type, devices: Sequence[jax.Device]
) -> tuple[Place, Any, Topology, GatherExpertDomain | None]:
    """Return a place, and its mesh and topology, in a part of the layers split into expert domains."""
    some = [place for place in PLACES if len(place.expert_axes) > 1 or dispatch not in (Forward, MultiRailDispatch)]
    place, kind = draw.spread("place", some), draw.spread("axes", [AxisType.Auto, AxisType.Explicit])
    devices = np.reshape(devices[: int(np.prod(place.sizes))], place.sizes)
    mesh = Mesh(devices, place.names, axis_types=(kind,) * len(place.names))
    choices = {**COSTS, "data_axes": [place.data_axes], "tensor_axes": [place.tensor_axes]}
    choices |= {"ranks_per_domain": [None, 1, *place.domains], "rails_per_node": list(place.rails)}
    given = {"tensor_axes": place.tensor_axes} if place.tensor_axes else {}
    if place.expert_axes != ("expert",):
        given |= {"expert_axis": place.expert_axes}
    topology = draw.options(Topology.from_mesh, choices | {"expert_axis": [place.expert_axes]}, mesh=mesh, **given)
    if not place.split:
        return place, mesh, topology, None
    mesh = hybrid_mesh(mesh, dict(place.split))
    domains = ExpertDomains.from_mesh(mesh, topology)
    return place, mesh, domains.between, GatherExpertDomain(domains)


def draw_layer(seed: int, devices: Sequence[jax.Device] | None = None) -> tuple[MoE, Draw]:
    """Return a random layer; raises the error of a refused combination."""
    draw = Draw(seed, np.random.default_rng(seed))
    dispatch = draw.spread("dispatch", DISPATCHES)
    place, mesh, topology, migrate = draw_mesh(draw, dispatch, jax.devices() if devices is None else devices)
    parts = place.parts
    num_experts = parts * draw.one([home for home in range(1, 9) if 4 <= home * parts <= 24 and home * parts % 2 == 0])
    width = num_experts + draw.one([2, 3, 4, 5, 6, 29])
    width += -width % 4 if place.embed or draw.rng.random() < 0.5 else 0
    _, dtype, param_dtype = draw.spread("dtypes", DTYPES)
    layer = draw.options(
        MoE,
        {
            "shared": [draw.options(SharedExpert, {"hidden_dim": [2, 8]})],
            "losses": [draw.options(Losses, {"switch": [0.5], "sequence": [0.5], "z": [0.05]})],
            "kernel_init": [nnx.initializers.normal(0.5)],
        },
        num_experts=num_experts,
        embed_dim=width,
        precision=draw.options(Precision, {}, dtype=dtype, param_dtype=param_dtype),
        system=draw_system(draw, dispatch, place, width, migrate),
        router=draw_router(draw, num_experts),
        experts=draw_experts(draw, place),
        mesh=mesh,
        topology=topology,
        rules=None if migrate else place.rules(),
        rngs=nnx.Rngs(seed),
    )
    return layer, draw


def plans_on_host(balancer: Any) -> bool:
    """Return whether `jax.export` cannot serialize the planner."""
    parts = balancer.balancers if isinstance(balancer, Chain) else (balancer,)
    return any(isinstance(part, HostCallback | PlannedOnHost | LPLB) for part in parts)


def options_of(function: Any) -> set[tuple[str, str]]:
    """Return the options to be drawn of a class or function."""
    return {(function.__qualname__, option) for option in parameters_of(function)} - {
        (function.__qualname__, option) for option in UNDRAWN
    }
