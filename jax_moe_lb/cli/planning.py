"""`Planner` plans for recorded counts, layer by layer and step by step, off any mesh."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from jax_moe_lb._custom_calls import has_planning_module
from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.legality import check_plan
from jax_moe_lb.plan import Plan, imbalance, load, plain_plan, straggler, traffic
from jax_moe_lb.topology import Topology
from jax_moe_lb.types import Counts, State


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
class Planner:
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
