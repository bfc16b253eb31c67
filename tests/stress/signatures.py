"""Random layers drawn from the signatures of the public classes: an option without values is an error."""

import inspect
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType

from jax_moe_lb import (
    Buffers,
    ExpertConfig,
    Losses,
    MoE,
    Precision,
    SharedExpert,
    System,
    TopK,
    Topology,
    kernels,
    transport,
)
from jax_moe_lb.balancers import Chain, Exact, Greedy, RailS, UltraEP
from jax_moe_lb.layer.systems import system_names
from jax_moe_lb.routing import GroupLimit
from jax_moe_lb.transport import CopyDispatch, Direct, MultiRailDispatch, PeerCopy, Relay, Replicate, Saved
from tests.layer_cases import make_mesh
from tests.test_options import DISPATCHES, REFUSED, ROUTERS, exported, values_of

REPLICATIONS = exported(transport, Replicate)
ACTIVATIONS = ["default", *(name for name in kernels.__all__ if name != "Experts")]
NAMED = [cls.__name__ for cls in (*ROUTERS, *DISPATCHES, *REPLICATIONS)] + ACTIVATIONS + list(system_names())
"""Parts of which each is in a layer."""
PARTS = {Buffers: "buffers", Saved: "saved", GroupLimit: "group_limit"}
DRAWN = [MoE, Topology.from_mesh, *ROUTERS, *DISPATCHES, *REPLICATIONS, *PARTS, System, ExpertConfig, SharedExpert]
DRAWN += [Losses, Precision]
"""Classes and functions whose options are drawn."""

UNDRAWN = {
    "rngs": "the seed of each layer",
    "balancer": "drawn with the dispatch that executes its plans",
    "dispatch": "see balancer",
    "migrate": "drawn by tests.stress.programs",
    "transfer": "rounds rows; drawn by tests.stress.programs",
    "transfer_dtype": "see transfer",
    "site": "a name in messages",
}
"""Options with a constant value or drawn together with another one, with the reason."""

WIDTH = 8


@dataclass(frozen=True)
class Place:
    """Mesh, expert and tensor axes, and logical axis rules without those for the expert axes."""

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    expert_axes: tuple[str, ...] = ("expert",)
    tensor_axes: tuple[str, ...] = ()
    data_axes: tuple[str, ...] | None = None
    exp: tuple[str, ...] = ()
    embed: str | None = None
    mlp: str | None = None

    def rules(self) -> tuple:
        return (("exp", (*self.expert_axes, *self.exp)), ("embed", self.embed), ("mlp", self.mlp))


CUBE = ("fsdp", "expert", "tensor")
PLACES = [
    Place((1,), ("expert",)),
    Place((4,), ("expert",)),
    Place((2, 2), ("node", "gpu"), ("node", "gpu")),
    Place((2, 4), ("node", "gpu"), ("node", "gpu")),
    Place((2, 2), ("data", "expert"), data_axes=("data",)),
    Place((2, 2), ("expert", "tensor"), tensor_axes=("tensor",), mlp="tensor"),
    Place((2, 2, 2), ("data", "expert", "tensor"), tensor_axes=("tensor",), data_axes=("data",), mlp="tensor"),
    Place((2, 2, 2), CUBE, tensor_axes=("tensor",), embed="fsdp", mlp="tensor"),
    Place((2, 2, 2), CUBE, tensor_axes=("tensor",), exp=("fsdp",), mlp="tensor"),
    Place((2, 2), ("fsdp", "expert"), embed="fsdp"),
    Place((2, 2), ("fsdp", "expert"), mlp="fsdp"),
]


def parameters_of(function: Any) -> dict[str, inspect.Parameter]:
    # The metaclass of Flax modules hides the signature of the class.
    found = inspect.signature(MoE.__init__ if function is MoE else function).parameters
    return {name: parameter for name, parameter in found.items() if name != "self"}


@dataclass
class Draw:
    """Random choices of one layer, its options with a drawn value, and the names of its parts."""

    rng: np.random.Generator
    changed: set[tuple[str, str]] = field(default_factory=set)
    parts: set[str] = field(default_factory=set)

    def one(self, values: list) -> Any:
        return values[self.rng.integers(len(values))]

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
    "num_experts_per_tok": [1, 2, 3],
    "max_experts_per_tok": [3, 4],
    "score": [jax.nn.sigmoid, jax.nn.softmax],
    "capacity_factor": [0.5, 1.0],
    "scale": [0.5, 2.0],
    "std": [0.5],
}
EXPERT_CHOICES = {"hidden_dim": [2, 8, 12], "gated": [True, False], "fuse_gate_up": [True, False]}
COSTS = {"bytes_per_s": [None], "latency_s": [None], "flops_per_s": [1e12]}
TRANSPORT_CHOICES = {
    "headroom": [0.5, 2.0],
    # Each round is in the compiled program.
    "max_rounds": [16],
    "chunks": [2],
    "moved_headroom": [2.0],
    "max_nodes": [2],
    "timeout_s": [60.0],
    "chunk_bytes": [64],
    "copies": [PeerCopy(chunk_bytes=64)],
    "replicas": [True],
    "rows": [True],
}


def of_class(cls: type, choices: dict[str, list]) -> dict[str, list]:
    """Remove the values refused by a class."""
    return choices | {option: [parameters_of(cls)[option].default] for of, option in REFUSED if of == cls.__name__}


def draw_router(draw: Draw) -> Any:
    # Scaled inputs require one expert per token.
    one = draw.rng.random() < 0.3
    choices = ROUTER_CHOICES | {"scale_inputs": [one]}
    choices |= {"num_experts_per_tok": [1], "max_experts_per_tok": [1]} if one else {}

    def group_limit() -> Any:
        return draw.options(GroupLimit, {"num_groups": [2, 4], "top_groups": [1, 2], "experts_per_score": [1, 2]})

    def top_k() -> TopK:
        return draw.options(TopK, {**choices, "group_limit": [group_limit()]})

    cls = draw.one(ROUTERS)
    return top_k() if cls is TopK else draw.options(cls, of_class(cls, {**choices, "router": [top_k()]}))


def draw_system(draw: Draw) -> System | str:
    if draw.rng.random() < 0.3:
        name = draw.one(system_names())
        draw.parts.add(name)
        return name
    cls = draw.one(DISPATCHES)
    whole = TRANSPORT_CHOICES if cls in (Direct, CopyDispatch) else TRANSPORT_CHOICES | {"chunks": [1]}
    buffers, saved = (draw.options(part, whole) for part in (Buffers, Saved))
    dispatch = draw.options(cls, of_class(cls, {**TRANSPORT_CHOICES, "buffers": [buffers], "saved": [saved]}))
    balancer = draw.one([Exact(), Greedy(), UltraEP()])
    balancer = Chain((balancer, RailS())) if cls is MultiRailDispatch else balancer
    replicate = draw.options(draw.one(REPLICATIONS), TRANSPORT_CHOICES)
    if isinstance(replicate, Relay):
        balancer = UltraEP()
    choices = {"replicate": [replicate], "replica_slots": [1, 2], "relocates": [True]}
    return draw.options(System, choices, balancer=balancer, dispatch=dispatch)


def draw_experts(draw: Draw) -> ExpertConfig:
    name = draw.one(ACTIVATIONS)
    draw.parts.add(name)
    activation = None if name == "default" else getattr(kernels, name)
    activation = activation() if inspect.isclass(activation) else activation
    gated = draw.one([True, False]) if activation is None else len(inspect.signature(activation).parameters) == 2
    choices = {**EXPERT_CHOICES, "fuse_gate_up": [gated]}
    return draw.options(ExpertConfig, choices, activation=activation, gated=gated)


def draw_layer(seed: int) -> tuple[MoE, Draw]:
    """Return a random layer; raises the error of a refused combination."""
    draw = Draw(np.random.default_rng(seed))
    place, kind = draw.one(PLACES), draw.one([AxisType.Auto, AxisType.Explicit])
    mesh = make_mesh(place.sizes, place.names, kind)
    choices = {**COSTS, "data_axes": [place.data_axes], "tensor_axes": [place.tensor_axes]}
    choices |= {"ranks_per_domain": [None, 1, 2], "rails_per_node": [1, 2], "expert_axis": [place.expert_axes]}
    given = {"tensor_axes": place.tensor_axes} if place.tensor_axes else {}
    if place.expert_axes != ("expert",):
        given |= {"expert_axis": place.expert_axes}
    topology = draw.options(Topology.from_mesh, choices, mesh=mesh, **given)
    losses = draw.options(Losses, {"switch": [0.5], "sequence": [0.5], "z": [0.05]})
    precision = draw.options(Precision, {"dtype": [jnp.float32], "param_dtype": [jnp.float32]})
    layer = draw.options(
        MoE,
        {
            "shared": [draw.options(SharedExpert, {"hidden_dim": [2, 8]})],
            "num_experts": [8, 16],
            "embed_dim": [WIDTH],
            "losses": [losses],
            "precision": [precision],
            "system": [draw_system(draw)],
            "kernel_init": [nnx.initializers.normal(0.5)],
        },
        router=draw_router(draw),
        experts=draw_experts(draw),
        mesh=mesh,
        topology=topology,
        rules=place.rules(),
        rngs=nnx.Rngs(seed),
    )
    return layer, draw


def options_of(function: Any) -> set[tuple[str, str]]:
    """Return the options to be drawn of a class or function."""
    return {(function.__qualname__, option) for option in parameters_of(function)} - {
        (function.__qualname__, option) for option in UNDRAWN
    }
