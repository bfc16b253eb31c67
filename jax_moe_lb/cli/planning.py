"""Balancers by name, and plans of recorded counts, layer by layer and step by step.

Names are those of the classes that `jax_moe_lb.balancers` exports.
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

from jax_moe_lb import balancers
from jax_moe_lb.balancers.base import Balancer, Chain
from jax_moe_lb.balancers.exact import Exact
from jax_moe_lb.core.custom_calls import has_planning_module
from jax_moe_lb.core.plan import Plan, imbalance, load, plain_plan, straggler, traffic
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, State
from jax_moe_lb.core.validation import check_plan
from jax_moe_lb.recordings.yaml_file import shown

WORDS = {"true": True, "false": False, "none": None}


def load_balancer(text: str) -> Balancer:
    """Makes what the option `--balancer` names.

    Args:
        text: `NAME`, a class of `jax_moe_lb.balancers` in lower case, such as `greedy`; with options
            `NAME:key=value,key=value`; or several joined by `+`, of which each edits the plan of the one before, as in
            `ultraep+rails`.

    Raises:
        ValueError: there is no such balancer or option, or a value is out of range; the message says what there is.

    Examples:
        >>> load_balancer("exact:eps=0.05,localize=false").eps
        0.05
    """
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
    return found(**dict(_option(found, name, pair) for pair in options.split(",") if options))


def _option(kind: type[Balancer], name: str, pair: str) -> tuple[str, Any]:
    key, _, text = pair.partition("=")
    known = inspect.signature(kind).parameters
    if key not in known:
        raise ValueError(f"--balancer {name} has no option {shown(key)}; expected one of {', '.join(known)}")
    try:
        value = WORDS[text] if text in WORDS else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    wanted = known[key].default
    # What may be left out has no default to compare with, and then it is a number.
    kinds = (
        (int, float, type(None)) if wanted is None else (int, float) if isinstance(wanted, float) else (type(wanted),)
    )
    if type(value) not in kinds:
        raise ValueError(f"--balancer {name}:{key} is {shown(text)}; expected a value like {wanted!r}, the default")
    return key, float(value) if isinstance(wanted, float) and isinstance(value, int) else value


def balancer_names() -> list[str]:
    """List every name that `load_balancer` accepts: those of `balancers.__all__` that need no arguments."""
    return sorted(_classes())


def _classes() -> dict[str, type[Balancer]]:
    """Map names to balancers: the class name in lower case, `eplb_plus` for `EPLBPlus`."""
    exported = {name: getattr(balancers, name) for name in balancers.__all__}
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
    """An effect says what a plan does, or what several do on average.

    Args:
        imbalance_before: `max / mean` of the load under plain expert parallelism.
        imbalance_after: `max / mean` of the load under the plan.
        straggler_before: `max - mean` of the load under plain expert parallelism, in token copies.
        straggler_after: `max - mean` of the load under the plan, in token copies.
        replicas: the slots that hold an expert of another rank.
        max_fan_out: the most copies of expert weights that one rank sends.
        planner_us: the wall-clock time of the planner once it is warm, in microseconds: in C++ on the host, or, where
            that was not built, of the compiled loop on the default device.
    """

    imbalance_before: float
    imbalance_after: float
    straggler_before: float
    straggler_after: float
    replicas: int | float
    max_fan_out: int | float
    planner_us: float


class Planned(NamedTuple):
    """This is a legal plan of one layer, with its effect and what the balancer remembers of it."""

    plan: Plan
    effect: Effect
    state: State


@dataclass(frozen=True)
class PlanRunner:
    """A planner runs one balancer for one machine.

    Args:
        balancer: edits the plans.
        topology: the ranks and domains of the machine.
        slots: `S`, slots per rank.
    """

    balancer: Balancer
    topology: Topology
    slots: int

    def replay(self, counts: Int[np.ndarray, "steps layers R E"]) -> Iterator[list[Planned]]:
        """Yields the plans of each step's layers; every layer's state is carried from step to step.

        Args:
            counts: `[steps, layers, R, E]` int32.

        Raises:
            ValueError: the slots or domains do not fit the counts, or a plan is illegal.
        """
        _, num_layers, *counts_shape = counts.shape
        state = self.balancer.init(tuple(counts_shape))
        if not has_planning_module():
            state = jax.device_put(state)
        # Outside what is reported: what is compiled or loaded only once.
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
        return Planned(after, _effect(counts, before, after, planner_us), state)

    def _timed(self, counts: Counts, before: Plan, state: State) -> tuple[Plan, State, float]:
        args = (counts, before, state)
        rebalance = partial(_on_host, self.balancer, self.topology)
        if not has_planning_module():
            # In training, counts are on the device already: their way there is no part of the time.
            args = jax.block_until_ready(jax.device_put(args))
            rebalance = partial(_compiled, self.balancer, self.topology)
        start = time.perf_counter()
        after, state = jax.block_until_ready(rebalance(*args))
        return after, state, (time.perf_counter() - start) * 1e6


def _on_host(balancer: Balancer, topology: Topology, counts: Counts, plan: Plan, state: State) -> tuple[Plan, State]:
    return balancer.rebalance(counts, plan, topology, state)


_compiled = jax.jit(_on_host, static_argnums=(0, 1))


def mean_effect(effects: Sequence[Effect]) -> Effect:
    """Averages every number."""
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
