"""Flows that share links: a fluid simulation with max-min fair rates.

A flow is a number of bytes with one or more *lanes*, each on one path. All lanes share the links of their paths max-min
fairly, with equal weight, and the lanes of a flow draw on the same bytes. All flows start at once; the exchange ends
with its last flow.

Rates change when flows end, and when a policy moves lanes to other paths, at most once per round. As thousands of flows
end one by one, time advances in steps of at most a round: flows ending within a step are slowed down to end with it,
and others share the freed rate. Link rates are never exceeded, and all bytes are delivered. Shorter rounds approach the
exact result of one step per end, which a round of 0 gives.
"""

import abc
import math
from functools import reduce
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from benchmarks.papers.paths import Fabric, Paths

FULL = 1 - 1e-9
"""Fraction of its rate from which a link counts as full, to allow for rounding errors."""

STEPS_LEFT = 4
"""The last rounds are split into steps of `1 / STEPS_LEFT` of the remaining time, at least `1 / SHORTEST` of a
round.
"""

SHORTEST = 64
"""Ratio of a round to the shortest step."""


Lanes = Int[np.ndarray, "n W"]
"""Path of each lane of the active flows."""


class Flows(NamedTuple):
    num_bytes: Float[np.ndarray, "F"]
    choices: Paths
    path: Int[np.ndarray, "F W"]


class Seen(NamedTuple):
    """Observations of active flows in the last round."""

    flows: Int[np.ndarray, "n"]
    marked: Bool[np.ndarray, "n W"]
    rounds_marked: Int[np.ndarray, "n"]
    queue_s_per_byte: Float[np.ndarray, "links"]


class Outcome(NamedTuple):
    seconds: float
    end_s: Float[np.ndarray, "F"]
    sent_bytes: Float[np.ndarray, "F"]
    link_bytes: Float[np.ndarray, "links"]
    busiest: Float[np.ndarray, "links"]
    steps: int
    moves: int


class Policy(abc.ABC):
    """Path selection of lanes; implement one for each transport reacting to congestion."""

    @abc.abstractmethod
    def react(self, flows: Flows, path: Lanes, seen: Seen, rng: np.random.Generator) -> Lanes:
        """Return the paths of the next round, in a new array if any changes."""


def simulate(flows: Flows, fabric: Fabric, policy: Policy | None, round_s: float, seed: int) -> Outcome:
    """Send all flows and return the result."""
    state = _State(flows, fabric)
    rng = np.random.default_rng(seed)
    now_s, react_s = 0.0, math.inf if policy is None else round_s
    while state.flows.size:
        now_s += state.step(round_s, react_s - now_s, now_s)
        # Sums of steps have rounding errors; without the margin a policy would wait another step.
        if policy is not None and now_s >= react_s - round_s / SHORTEST:
            react_s = now_s + round_s
            state.react(policy, rng)
    return Outcome(now_s, *(getattr(state, name) for name in Outcome._fields[1:]))


class _State:
    """State between two steps of a simulation, with ended flows removed from all arrays `[n, ...]`."""

    def __init__(self, flows: Flows, fabric: Fabric) -> None:
        self.all, self.bytes_per_s, self.marks = flows, fabric.bytes_per_s(), fabric.marks()
        num_flows, num_links = len(flows.num_bytes), len(self.bytes_per_s)
        self.flows = np.arange(num_flows)
        self.left = flows.num_bytes.astype(np.float64)
        self.path = flows.path
        self.links = self._links_of_lanes()
        self.rounds_marked = np.zeros(num_flows, np.int32)
        self.used = np.zeros(num_links)
        self.end_s, self.sent_bytes = np.zeros(num_flows), np.zeros(num_flows)
        self.link_bytes, self.busiest = np.zeros(num_links), np.zeros(num_links)
        self.steps = self.moves = 0

    def _links_of_lanes(self) -> Int[np.ndarray, "n W C"]:
        return self.all.choices[self.flows[:, None], self.path]

    def _lanes(self) -> Int[np.ndarray, "lanes C"]:
        return self.links.reshape(-1, self.links.shape[2])

    def step(self, round_s: float, until_react_s: float, now_s: float) -> float:
        """Advance until flows end or the policy reacts; return the step in seconds."""
        num_lanes = self.path.shape[1]
        lanes = self._lanes()
        least_s = self._shortest_step_s(round_s)
        # Slow down flows that would end sooner, so that they end with the step.
        most = np.repeat(self.left / num_lanes / least_s if least_s else np.full(self.left.shape, np.inf), num_lanes)
        rates = max_min_rates(lanes, self.bytes_per_s, most)
        self.used = _per_link(lanes, rates, self.bytes_per_s.size)
        rate = rates.reshape(self.path.shape).sum(1)
        ends_s = self.left / rate
        step_s = min(float(ends_s.min()), max(until_react_s, least_s))
        self._advance(rate, step_s, ends_s <= step_s * (1 + 1e-9), now_s + step_s)
        return step_s

    def _shortest_step_s(self, round_s: float) -> float:
        """Return a round, or less if the busiest link has little left."""
        num_lanes = self.path.shape[1]
        left = np.repeat(self.left / num_lanes, num_lanes)
        left_bytes = _per_link(self._lanes(), left, self.bytes_per_s.size)
        left_s = float((left_bytes / self.bytes_per_s).max())
        return min(max(left_s / STEPS_LEFT, round_s / SHORTEST), round_s)

    def _advance(self, rate: np.ndarray, step_s: float, ends: np.ndarray, end_s: float) -> None:
        sent = np.where(ends, self.left, rate * step_s)
        self.steps += 1
        self.link_bytes += self.used * step_s
        self.busiest = np.maximum(self.busiest, self.used / self.bytes_per_s)
        # A flow that ends has sent exactly its remaining bytes, regardless of rounding.
        self.sent_bytes[self.flows] += sent
        self.end_s[self.flows[ends]] = end_s
        self.left = self.left - sent
        if ends.any():
            stay = ~ends
            self.flows, self.left, self.path = self.flows[stay], self.left[stay], self.path[stay]
            self.links, self.rounds_marked = self.links[stay], self.rounds_marked[stay]

    def react(self, policy: Policy, rng: np.random.Generator) -> None:
        """Apply the policy to the last step, and move lanes."""
        full = self.used >= FULL * self.bytes_per_s
        marked = (full & self.marks)[self.links].any(2)
        self.rounds_marked = np.where(marked.any(1), self.rounds_marked + 1, 0)
        number = np.bincount(self.links.ravel(), minlength=full.size)
        queue = np.where(full, number / self.bytes_per_s, 0.0)
        path = policy.react(self.all, self.path, Seen(self.flows, marked, self.rounds_marked, queue), rng)
        if path is not self.path:
            moved = path != self.path
            self.moves += int(moved.sum())
            self.rounds_marked = np.where(moved.any(1), 0, self.rounds_marked)
            self.path = path
            self.links = self._links_of_lanes()


def max_min_rates(
    links: Int[np.ndarray, "lanes C"], bytes_per_s: Float[np.ndarray, "links"], most: Float[np.ndarray, "lanes"]
) -> Float[np.ndarray, "lanes"]:
    """Return max-min fair rates by progressive filling: no rate can increase without reducing one that is not higher.

    In each iteration, a link fixes its lanes at its equal share if no other link offers them less. A lane limited by
    `most` below all offers is fixed at that. The links then divide their remaining rate again.
    """
    rates = np.empty(len(links))
    going = np.arange(len(links))
    by_link = np.ascontiguousarray(links.T)
    left = bytes_per_s.copy()
    number = np.bincount(links.ravel(), minlength=left.size)
    while going.size:
        share = np.where(number > 0, left / np.maximum(number, 1), np.inf)
        offered = share.take(by_link)
        least = reduce(np.minimum, offered, most[going])
        # Rounding may reduce a share between two iterations.
        bottleneck = number > 0
        bottleneck[by_link[offered > least * (1 + 1e-12)]] = False
        done = reduce(np.logical_or, bottleneck.take(by_link), most[going] <= least)
        rates[going[done]] = least[done]
        fixed = by_link[:, done]
        # Rounding may slightly exceed the rate of a link.
        left = np.maximum(left - _per_link(fixed.T, least[done], left.size), 0.0)
        number = number - np.bincount(fixed.ravel(), minlength=left.size)
        stay = np.flatnonzero(~done)
        going, by_link = going[stay], by_link.take(stay, 1)
    return rates


def _per_link(links: Int[np.ndarray, "lanes C"], value: Float[np.ndarray, "lanes"], num_links: int) -> np.ndarray:
    """Return the sum over the lanes of each link; the last link, the placeholder, has 0."""
    total = np.bincount(links.ravel(), np.repeat(value, links.shape[1]), num_links)
    total[-1] = 0.0
    return total
