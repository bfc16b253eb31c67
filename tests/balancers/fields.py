"""Values of the fields of every exported balancer: a new balancer or field takes part in all tests by itself."""

import dataclasses
import inspect
import typing

import numpy as np

from jax_moe_lb import Balancer, balancers, contrib
from jax_moe_lb.balancers import EPLB, Chain, Cost, Exact, FasterMoE, Given, Greedy, HostCallback, RailS, UltraEP
from jax_moe_lb.contrib import LPLB

VALUES = {
    "balancers": [(Exact(), RailS())],
    "bytes_per_s": [1e-3, 1e6],
    "capacity": [1.0, 2.0],
    "chunks": [1, 3],
    "cost": [Cost(100.0, 1.0, required=False)],
    "distances": [(3, 1)],
    "domain_size": [1],
    "eps": [0.0, 0.3],
    "every": [1, 3],
    "expert_bytes": [1.0, 1e9],
    "flops_per_s": [1e-3, 1e6],
    "gradient_bytes": [1.0, 1e9],
    "max_fan_out": [1, 2],
    "max_num_dyn": [1],
    "min_imbalance": [1.0, 3.0],
    "min_saved": [5, 19],
    "min_tokens": [2, 100],
    "num_dynamic": [1],
    "number": [1, 3],
    "speeds": [(1, 2, 0, 1)],
    "tau": [5, 20],
    "token_bytes": [1e-3, 1e6],
    "token_flops": [1e-3, 1e6],
}
"""Other values of fields whose annotation gives none, for loads of about a hundred tokens."""

FIXED = {
    FasterMoE: dict.fromkeys(("token_bytes", "token_flops", "bytes_per_s", "flops_per_s"), 1.0)
    | dict.fromkeys(("expert_bytes", "gradient_bytes"), 100.0),
    EPLB: {"every": 2},
    LPLB: {"every": 2},
    UltraEP: {"min_tokens": 4},
    Given: {"number": 2},
    Chain: {"balancers": (Greedy(min_tokens=2), Exact())},
}
"""Values of fields by default, if those of the class are required or too large for these loads."""


def kinds() -> list[type[Balancer]]:
    """Return all exported balancers but `HostCallback`, whose planner is the user's."""
    public = [getattr(room, name) for room in (balancers, contrib) for name in room.__all__]
    found = [kind for kind in public if inspect.isclass(kind) and issubclass(kind, Balancer)]
    return [kind for kind in found if not inspect.isabstract(kind) and kind is not HostCallback]


def names_of(kind: type[Balancer]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.init]


def values_of(kind: type[Balancer], name: str) -> list:
    """Return values of a field besides the default."""
    (field,) = (field for field in dataclasses.fields(kind) if field.name == name)
    annotation = typing.get_type_hints(kind)[name]
    if annotation is bool:
        return [not field.default]
    if typing.get_origin(annotation) is typing.Literal:
        return [value for value in typing.get_args(annotation) if value != field.default]
    return VALUES[name]


def made(kind: type[Balancer], **options) -> Balancer:
    return kind(**FIXED.get(kind, {}) | options)


def draw_balancer(rng: np.random.Generator, without: tuple[str, ...] = ()) -> Balancer:
    """Return a balancer, of which half of the fields have another value."""
    kind = kinds()[rng.integers(len(kinds()))]
    some = [name for name in names_of(kind) if name not in without and rng.random() < 0.5]
    values = {name: values_of(kind, name) for name in some}
    return made(kind, **{name: of[rng.integers(len(of))] for name, of in values.items()})
