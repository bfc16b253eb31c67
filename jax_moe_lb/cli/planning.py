"""Balancers by name, and plans of recorded counts by layer and step.

The names are derived from `__all__` of `jax_moe_lb.balancers` and `jax_moe_lb.contrib`.
"""

import ast
import inspect
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from jax_moe_lb import balancers, contrib
from jax_moe_lb.balancers.base import Balancer, Chain
from jax_moe_lb.balancers.exact import Exact
from jax_moe_lb.core.checks import shown
from jax_moe_lb.core.custom_calls import has_planning_module
from jax_moe_lb.core.plan import Plan, imbalance, load, plain_plan, straggler, traffic
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, State
from jax_moe_lb.core.validation import check_plan
from jax_moe_lb.sim.planner_times import needs_counts

MOST_OPTION = 1000
"""Maximum characters of a value; the parser of Python fails on longer ones without a `SyntaxError`."""

LITERALS = {"true": True, "false": False, "none": None}


def load_balancer(text: str) -> Balancer:
    """Construct the balancer of the option `--balancer`."""
    parts = tuple(_one(part) for part in text.split("+"))
    if any(isinstance(part, Exact) for part in parts[1:]):
        raise ValueError(
            f"--balancer is {shown(text)}; expected exact first, as it drops the replicas of others; "
            f"simulate --system takes hybridep+exact"
        )
    return parts[0] if len(parts) == 1 else Chain(parts)


def _one(text: str) -> Balancer:
    name, _, options = text.partition(":")
    if (found := _classes().get(name)) is None:
        raise ValueError(f"--balancer is {shown(name)}; expected one of {', '.join(balancer_names())}")
    pairs = [_option(found, name, pair) for pair in options.split(",") if options]
    given = dict(pairs)
    if len(given) < len(pairs):
        raise ValueError(f"--balancer {name} is {shown(text)}; expected every option once")
    try:
        return found(**given)
    except TypeError as error:
        raise ValueError(f"--balancer {name}: {error}") from error


def _option(kind: type[Balancer], name: str, pair: str) -> tuple[str, Any]:
    key, _, text = pair.partition("=")
    known = inspect.signature(kind).parameters
    if key not in known:
        raise ValueError(f"--balancer {name} has no option {shown(key)}; expected one of {', '.join(known)}")
    try:
        value = LITERALS[text] if text in LITERALS else ast.literal_eval(text[:MOST_OPTION])
    except (ValueError, SyntaxError):
        value = text
    wanted = known[key].default
    # Every option with the default None is a number.
    kinds = (
        (int, float, type(None)) if wanted is None else (int, float) if isinstance(wanted, float) else (type(wanted),)
    )
    if type(value) not in kinds:
        raise ValueError(f"--balancer {name}:{key} is {shown(text)}; expected a value like {wanted!r}, the default")
    return key, float(value) if isinstance(wanted, float) and isinstance(value, int) else value


def balancer_names() -> list[str]:
    """List the names accepted by `load_balancer`: balancers without required arguments."""
    return sorted(_classes())


def _classes() -> dict[str, type[Balancer]]:
    """Map names to balancers: the class name in lower case, `eplb_plus` for `EPLBPlus`."""
    exported = {name: getattr(room, name) for room in (balancers, contrib) for name in room.__all__}
    return {
        re.sub("(?<=[A-Z])(?=[A-Z][a-z]{2})", "_", name).lower(): value
        for name, value in exported.items()
        if _is_usable(value)
    }


def _is_usable(value: object) -> bool:
    if not (isinstance(value, type) and issubclass(value, Balancer)) or inspect.isabstract(value):
        return False
    parameters = inspect.signature(value).parameters.values()
    return all(parameter.default is not inspect.Parameter.empty for parameter in parameters)


@dataclass(frozen=True)
class Effect:
    """Effect of one plan, or the mean over several plans."""

    imbalance_before: float  # `max / mean` of the ranks' load under plain expert parallelism
    imbalance_after: float  # `max / mean` of the ranks' load under the plan
    straggler_before: float  # `max - mean` of the ranks' load under plain expert parallelism, in token copies
    straggler_after: float  # `max - mean` of the ranks' load under the plan, in token copies
    replicas: int | float  # number of slots holding an expert of another rank
    max_fan_out: int | float  # maximum over ranks of the expert copies sent
    # Wall-clock time of the planner after a warm-up call, in microseconds. The planner in C++ runs on the host; without
    # it, the jitted planner runs on the default device.
    planner_us: float


class Planned(NamedTuple):
    """Legal plan of one layer, its effect, the next state of the balancer, and whether the plan differs from plain."""

    plan: Plan
    effect: Effect
    state: State
    changed: bool


@dataclass(frozen=True)
class PlanRunner:
    """One balancer applied to recorded counts."""

    balancer: Balancer  # balancer of the plans
    topology: Topology  # ranks and domains of the machine
    slots: int  # `S`, slots per rank, with those of home experts

    def replay(self, counts: Int[np.ndarray, "steps layers R E"]) -> Iterator[list[Planned]]:
        """Plan every layer of every step; each layer carries its balancer state from step to step."""
        _, num_layers, *counts_shape = counts.shape
        state = self.balancer.init(tuple(counts_shape))
        if not has_planning_module():
            state = jax.device_put(state)
        # Warm up: planner times exclude compilation and loading.
        self._timed(counts[0, 0], plain_plan(counts[0, 0], self.topology, self.slots), state)
        states = [state] * num_layers
        for step in counts:
            planned = [self._plan(layer, state) for layer, state in zip(step, states, strict=True)]
            states = [layer.state for layer in planned]
            yield planned

    def _plan(self, counts: Counts, state: State) -> Planned:
        before = plain_plan(counts, self.topology, self.slots)
        after, state, planner_us = self._timed(counts, before, state)
        after = jax.tree.map(np.asarray, after)
        try:
            check_plan(after, counts)
        except ValueError as error:
            raise ValueError(f"{type(self.balancer).__name__} made an illegal plan: {error}") from error
        return Planned(after, _effect(counts, before, after, planner_us), state, self._differs(before, after))

    def _differs(self, before: Plan, after: Plan) -> bool:
        if not np.array_equal(before.placement, after.placement) or not np.array_equal(before.quota, after.quota):
            return True
        # On one node or one rail per node, rails have no choice.
        num_home = after.num_home
        return after.rails is not None and self.balancer.no_op_reason(self.topology, num_home, self.slots) is None

    def _timed(self, counts: Counts, before: Plan, state: State) -> tuple[Plan, State, float]:
        args = (counts, before, state)
        rebalance = partial(_on_host, self.balancer, self.topology)
        if not has_planning_module():
            # During training the counts are on the device, so exclude the transfer from the planner time.
            args = jax.block_until_ready(jax.device_put(args))
            rebalance = partial(_compiled, self.balancer, self.topology)
        start = time.perf_counter()
        after, state = jax.block_until_ready(rebalance(*args))
        return after, state, (time.perf_counter() - start) * 1e6


def _on_host(balancer: Balancer, topology: Topology, counts: Counts, plan: Plan, state: State) -> tuple[Plan, State]:
    return balancer.rebalance(counts, plan, topology, state)


_compiled = jax.jit(_on_host, static_argnums=(0, 1))


def mean_effect(effects: Sequence[Effect]) -> Effect:
    """Return the mean per field."""
    rows = [asdict(effect) for effect in effects]
    return Effect(**{key: float(np.mean([row[key] for row in rows])) for key in rows[0]})


def _effect(counts: Counts, before: Plan, after: Plan, planner_us: float) -> Effect:
    moved = traffic(after, counts)
    return Effect(
        imbalance_before=float(imbalance(load(before))),
        imbalance_after=float(imbalance(load(after))),
        straggler_before=float(straggler(load(before))),
        straggler_after=float(straggler(load(after))),
        replicas=int(moved.replicas),
        max_fan_out=int(moved.fan_out.max()),
        planner_us=planner_us,
    )


def no_op_reason(runner: PlanRunner, counts: Int[np.ndarray, "steps layers R E"]) -> str:
    """Return the reason why no plan of these counts differs from plain expert parallelism."""
    balancer, topology = runner.balancer, runner.topology
    num_steps, _, num_ranks, num_experts = counts.shape
    if num_ranks == 1:
        return "the counts have one rank"
    if reason := balancer.no_op_reason(topology, num_experts // num_ranks, runner.slots):
        return reason
    if not needs_counts(balancer):
        return f"{type(balancer).__name__} serves every expert on its home rank, for all counts"
    load_of_ranks = counts.sum(2, dtype=np.int64).reshape(-1, num_ranks, num_experts // num_ranks).sum(-1)
    if (load_of_ranks == load_of_ranks[:, :1]).all():
        return "the load of the ranks is already equal"
    if jax.tree.leaves(balancer.init((num_ranks, num_experts))):
        name = type(balancer).__name__
        return f"{name} plans from the counts of earlier steps, and the input has {num_steps - 1} of them"
    return f"{balancer} found no better plan within its limits"
