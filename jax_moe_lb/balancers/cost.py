"""Cost model weighing the replicas of a plan against the tokens saved, in seconds."""

import math
import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jax_moe_lb.balancers.base import LayerCost
from jax_moe_lb.core.checks import Count, Natural, NonNegative, Positive, checked_fields, shown
from jax_moe_lb.core.device_rates import GpuRates, device_rates, rated_devices
from jax_moe_lb.core.plan import IntScalar, Plan, load
from jax_moe_lb.core.topology import INT32_MAX, Level, Topology
from jax_moe_lb.core.types import AnyArray, host_iota, namespace
from jax_moe_lb.planners.relay import check_relay

SIZES = ("expert_bytes", "token_flops", "token_bytes", "gradient_bytes", "overlap_s")
"""Fields of `Cost` derived from the layer."""

OF_LAYER = ("max_rows", "slot_copies", "num_copies", "round_rows", "round_s", "relays")
"""Fields of `Cost` equal to those of the layer."""

TRAINING_PASSES = 4
"""Operations of training relative to the forward pass, which the backward pass repeats."""

TRAINING_EXCHANGES = 5
"""Exchanges of rows in training: copies, outputs, gradients of outputs, copies again, and gradients of copies."""

WEIGHT_TRANSFERS = 2
"""Transfers of a replica's weights in training: for the forward and for the backward pass."""

MOST_COPIES = INT32_MAX // 4
"""Largest time in token copies, so that a sum of a load and a few times fits int32."""


@dataclass(frozen=True)
@checked_fields
class Cost:
    """Time model of a plan, in seconds of the slowest rank: the load and the transfer of replicas.

    `exact()` uses it by default; pass it to `Exact(cost=...)` with other options. `Exact` then limits the replicas sent
    and received by a rank to the number with the least time, and keeps the old plan if no new one saves time.

    A plan takes `max(load)` times `token_s` seconds, plus the time to transfer `busiest` replicas, plus `round_s` for
    each further round of the receive buffer. `busiest` is the maximum number of replicas sent or received by one rank,
    because a rank sends and receives at the same time. Times are compared as integers: `scale` gives the time of a
    transfer in token copies. All ranks, in NumPy and in jitted programs, therefore decide equally.

    The rates come from the topology: `flops_per_s`, and the `bytes_per_s` of the levels. Replicas use the slowest level
    inside a domain.

    Args:
        expert_bytes: bytes moved per replica: the weights of an expert and, in training, its gradients. If weights are
            transferred again for the backward pass, they count twice. `None` (default) takes these three for the
            experts of the layer.
        token_flops: floating-point operations per token copy: twice the parameters of the expert for the forward pass,
            and four times as many for training with rematerialization. `None` (default) takes these.
        token_bytes: bytes moved per token copy in all exchanges. `None` (default) takes five exchanges of the layer's
            rows, those of training.
        gradient_bytes: part of `expert_bytes` that travels beside the work after the experts. `None` (default) takes
            the gradients of the layer's experts if `expert_bytes` is `None`, too; else 0.
        overlap_s: seconds of that work, the overlap budget: gradients take no time up to it. `None` (default) takes
            twice `LayerCost.between_s`; 0 if it is unknown.
        max_bytes: maximum bytes of weights sent or received by one rank in a pass, such as the bytes hidden by other
            work; `None` (default) for no bound.
        max_rows: maximum number of token copies that a rank can serve in all its rounds. A plan above it is replaced at
            any price. `None` (default) takes that of the layer.
        slot_copies: time of the products of a replica beyond its tokens, in token copies: kernels read its weights, and
            fill their last tile. `None` (default) takes that of the layer; 0 if it is unknown.
        num_copies: mean load of a rank, which decides whether limits are worth planning. `None` (default) takes that of
            the layer.
        round_rows: token copies that a rank serves in one round, at least 1. `None` (default) takes those of the layer;
            any number if they are unknown.
        round_s: seconds per round after the first beyond its token copies. `None` (default) takes those of the
            layer; 0 if they are unknown.
        relays: `min_replicas`, `max_relays` and `min_gain` of `transport.Relay`: relays then forward the weights of an
            expert with many replicas, and gradients return to the home directly. `None` (default) takes those of the
            layer, which has none without `Relay`.
        device: kind of device whose rates replace missing rates of the topology, such as `"h100"`; a file of
            `core/devices`. `None` (default) takes that of the layer if `required` is False, else no replacement.
        required: if True (default), a missing rate or size is an error. If False, as in `exact()`, `Exact` then plans
            without a cost.

    Raises:
        ValueError: a number is out of range, or there are no rates of `device`.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Cost, Topology
        >>> from jax_moe_lb.balancers import Exact
        >>> from jax_moe_lb.core import Level, load, plain_plan
        >>> topology = Topology((Level("gpu", 4, bytes_per_s=450e9),), ranks_per_domain=4, flops_per_s=500e12)
        >>> numbers = 3.0 * 6144 * 2048  # of one expert
        >>> balancer = Exact(cost=Cost(expert_bytes=2 * numbers, token_flops=2 * numbers))
        >>> counts = np.array([[3, 4, 2, 1], [3, 4, 2, 1], [3, 4, 2, 2], [3, 3, 1, 2]], np.int32)
        >>> for scale in (1, 1000):
        ...     start = plain_plan(counts * scale, topology, slots=2)
        ...     print(load(balancer.rebalance(counts * scale, start, topology, ())[0]))
        [12 15  7  6]
        [10000 10000 10000 10000]
    """

    expert_bytes: Positive | None = None
    token_flops: Positive | None = None
    token_bytes: NonNegative | None = None
    gradient_bytes: NonNegative | None = None
    overlap_s: NonNegative | None = None
    max_bytes: Positive | None = None
    max_rows: Natural | None = None
    slot_copies: Natural | None = None
    num_copies: Natural | None = None
    round_rows: Count | None = None
    round_s: NonNegative | None = None
    relays: tuple[int, int, int] | None = None
    device: str | None = None
    required: bool = True

    def __post_init__(self) -> None:
        if self.device is not None and self.device not in rated_devices():
            raise ValueError(f"device is {shown(self.device)}; expected one with rates: {', '.join(rated_devices())}")
        if self.relays is not None:
            check_relay(*self.relays)

    def sized(self, facts: LayerCost) -> "Cost":
        """Return the cost with unset sizes derived from training the layer.

        Args:
            facts: sizes of the layer.
        """
        found: dict[str, Any] = {name: getattr(self, name) for name in SIZES}
        if found["expert_bytes"] is None and facts.expert_bytes is not None:
            gradients = facts.gradient_bytes or facts.expert_bytes
            found["expert_bytes"] = float(2 * facts.expert_bytes + gradients)
            if found["gradient_bytes"] is None:
                found["gradient_bytes"] = float(gradients)
        if found["token_flops"] is None and facts.token_flops is not None:
            found["token_flops"] = float(TRAINING_PASSES * facts.token_flops)
        if found["token_bytes"] is None and facts.token_bytes is not None:
            found["token_bytes"] = float(TRAINING_EXCHANGES * facts.token_bytes)
        if found["overlap_s"] is None and facts.between_s is not None:
            found["overlap_s"] = 2 * facts.between_s
        for name in OF_LAYER:
            found[name] = getattr(facts, name) if getattr(self, name) is None else getattr(self, name)
        device = facts.device if self.device is None and not self.required else self.device
        return replace(self, device=device, **found)

    def is_known(self, topology: Topology, domain: int) -> bool:
        """Return whether all sizes and rates are known; always True if `required`, as a missing one is then an error.

        Args:
            topology: topology with the rates.
            domain: ranks per domain.
        """
        if self.required:
            return True
        try:
            self.scale(topology, domain, 1)
        except ValueError:
            return False
        return True

    def scale(self, topology: Topology, domain: int, most: int) -> "TimeScale":
        """Return the times of replicas and of further rounds in token copies.

        Args:
            topology: topology with the rates.
            domain: ranks per domain.
            most: largest number of replicas of one rank.

        Raises:
            ValueError: the topology lacks a rate, or a size is `None`.
        """
        return _scale(self, topology, domain, most)

    def _most_replicas(self, most: int) -> int:
        """Return the maximum number of replicas of one rank within `max_bytes`, at most `most`."""
        if self.max_bytes is None:
            return most
        weights = (_known("expert_bytes", self.expert_bytes) - (self.gradient_bytes or 0.0)) / WEIGHT_TRANSFERS
        return math.floor(min(self.max_bytes / max(weights, 1.0), most))

    def _token_s(self, topology: Topology) -> float:
        """Return the seconds of a token copy on the busiest rank: in the expert, and in the exchanges."""
        exchange_s = self.token_bytes * slowest_share_s(topology) if self.token_bytes else 0.0
        return self._compute_s(topology) + exchange_s

    def _compute_s(self, topology: Topology) -> float:
        """Return the seconds of a token copy in the expert."""
        return _known("token_flops", self.token_flops) / _rate("Topology.flops_per_s", topology.flops_per_s)

    def _rated(self, topology: Topology) -> Topology:
        """Return the topology with the rates of `device` in place of missing ones."""
        if self.device is None:
            return topology
        rates = device_rates(self.device, "tpu" if self.device.startswith(("v", "tpu")) else "cuda")
        network = getattr(rates, "network", rates.link) * getattr(rates, "network_share", 1.0)
        levels = tuple(
            level
            if level.bytes_per_s is not None
            else replace(level, bytes_per_s=rates.link * rates.link_share if level.name == "gpu" else network)
            for level in topology.levels
        )
        flops = rates.experts_speed if isinstance(rates, GpuRates) else rates.grouped["product"]
        flops = flops if topology.flops_per_s is None else topology.flops_per_s
        return replace(topology, levels=levels, flops_per_s=flops)


class Relayed(NamedTuple):
    """Weights of replicas along relays, by the number of copies."""

    table: Int[np.ndarray, "N"]  # time in token copies by the maximum number of copies sent or received by one rank
    from_home: Int[np.ndarray, "N"]  # copies sent by the home of an expert with some number of replicas
    from_relay: Int[np.ndarray, "N"]  # copies sent by each of its relays


class TimeScale(NamedTuple):
    """Times in token copies; see `Cost.scale`."""

    # Time of a transfer by the maximum number of replicas of one rank, ascending from 0. Numbers beyond `max_bytes`
    # have the int32 maximum over 4.
    table: Int[np.ndarray, "N"]
    relayed: "Relayed | None"  # with relays, the time of weights; `table` is then that of gradients
    slot: int  # time of the products of a replica beyond its tokens
    round_rows: int  # token copies served by a rank in one round
    further_round: int  # time of each round after the first
    most_rounds: int  # number of further rounds that count, so that times fit int32

    @property
    def one_copy(self) -> int:
        """Time of the weights of one copy beside `table`."""
        return 0 if self.relayed is None else int(self.relayed.table[1])

    def rounds(self, max_load: Int[AnyArray, "N"] | IntScalar) -> Int[AnyArray, "N"] | IntScalar:
        """Return the time of the further rounds of a maximum load."""
        xp = namespace(max_load)
        further = xp.maximum(max_load - np.int32(1), np.int32(0)) // np.int32(self.round_rows)
        return xp.minimum(further, np.int32(self.most_rounds)) * np.int32(self.further_round)


@lru_cache(maxsize=256)
def _scale(cost: Cost, topology: Topology, domain: int, most: int) -> TimeScale:
    # Compute the table in Python, once, and look it up in the program. Floating point may round differently on
    # different devices, and ranks deciding differently would deadlock.
    rated = cost._rated(topology)
    token_s, rate = cost._token_s(rated), slowest_bytes_per_s(rated, domain)
    expert_bytes, gradient_bytes = _known("expert_bytes", cost.expert_bytes), cost.gradient_bytes or 0.0

    def table_of(nbytes: float, returned: float, most_replicas: int) -> Int[np.ndarray, "N"]:
        hidden_s = [min(number * returned / rate, cost.overlap_s or 0.0) for number in range(most + 1)]
        found = [in_copies(number * nbytes / rate - hidden, token_s) for number, hidden in enumerate(hidden_s)]
        table = np.where(np.arange(most + 1) <= most_replicas, np.array(found), MOST_COPIES).astype(np.int32)
        table.setflags(write=False)
        return table

    if cost.relays is None:
        table, relayed = table_of(expert_bytes, gradient_bytes, cost._most_replicas(most)), None
    else:
        weights = table_of(expert_bytes - gradient_bytes, 0.0, cost._most_replicas(most))
        table, relayed = table_of(gradient_bytes, gradient_bytes, most), Relayed(weights, *_trees(domain, *cost.relays))
    slot_s, most_rounds = (cost.slot_copies or 0) * cost._compute_s(rated), 2 * topology.num_ranks
    return TimeScale(
        table,
        relayed,
        # A rank receives at most `most` replicas, and the product must fit int32.
        min(in_copies(slot_s, token_s), MOST_COPIES // max(most, 1)),
        min(cost.round_rows or INT32_MAX, INT32_MAX),
        min(in_copies(cost.round_s or 0.0, token_s), MOST_COPIES // most_rounds),
        most_rounds,
    )


def _trees(domain: int, min_replicas: int, max_relays: int, min_gain: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the copies sent by the home of an expert and by each of the relays, by the number of replicas."""
    from_home, from_relay = np.arange(domain + 1, dtype=np.int32), np.zeros(domain + 1, np.int32)
    for number in range(min_replicas, domain + 1):
        relays = max(min(math.isqrt(number), max_relays, number - 1), 1)
        if number - max(relays, (number - 1) // relays) >= min_gain:
            from_home[number], from_relay[number] = relays, (number - 1) // relays
    return from_home, from_relay


def in_copies(seconds: float, token_s: float) -> int:
    """Return a time in token copies of `token_s` seconds, rounded down, at most `MOST_COPIES`."""
    # A number of saved copies above it is worth more than the time.
    # A token can take no time at some rates.
    return math.floor(min(max(seconds, 0.0) / max(token_s, sys.float_info.min), MOST_COPIES))


def min_saved(cost_s: float, token_s: float) -> int:
    """Return the minimum number of token copies of `token_s` seconds worth more than `cost_s` seconds, within int32."""
    # A token can take no time at some rates.
    worth = cost_s / max(token_s, sys.float_info.min)
    return math.floor(min(max(worth, -INT32_MAX), INT32_MAX - 1)) + 1


def slowest_share_s(topology: Topology) -> float:
    """Return the seconds per byte of an even exchange on the slowest level, which a served copy adds to the rank."""
    found, outer = [0.0], 1
    for level in topology.levels:
        if level.size > 1:
            # The share of rows from another member of this level and the same member of outer levels.
            found.append((1 / outer - 1 / (outer * level.size)) / _rate(_name(level), level.bytes_per_s))
        outer *= level.size
    return max(found)


def slowest_bytes_per_s(topology: Topology, domain: int) -> float:
    """Return the lowest rate between two ranks of a domain, in bytes per second."""
    rates, inner = [math.inf], 1
    for level in reversed(topology.levels):
        if inner < domain and level.size > 1:
            rates.append(_rate(_name(level), level.bytes_per_s))
        inner *= level.size
    return min(rates)


def received(plan: Plan) -> Int[AnyArray, "R"]:
    """Return the number of replicas per rank, int32."""
    return (plan.placement[:, plan.num_home :] >= 0).sum(1, dtype=np.int32)


def busiest(plan: Plan) -> IntScalar:
    """Return the maximum number of replicas sent or received by one rank, an int32 scalar."""
    replicas = plan.placement[:, plan.num_home :]
    homes = namespace(plan.quota).where(replicas >= 0, replicas // np.int32(plan.num_home), np.int32(-1))
    sent = (homes[..., None] == host_iota(plan.num_ranks)[None, None]).sum((0, 1), dtype=np.int32).max()
    return namespace(plan.quota).maximum(received(plan).max(), sent)


def moved_copies(plan: Plan, scale: TimeScale) -> IntScalar:
    """Return the time to transfer the replicas of a plan, in token copies."""
    xp, number = namespace(plan.quota), busiest(plan)
    time = xp.asarray(scale.table)[number]
    if scale.relayed is None:
        return time
    replicas = plan.placement[:, plan.num_home :]
    of_expert = (replicas[..., None] == host_iota(plan.num_experts)[None, None]).sum((0, 1), dtype=np.int32)
    homes = xp.asarray(scale.relayed.from_home)[of_expert].reshape(-1, plan.num_home).sum(1, dtype=np.int32).max()
    relays = xp.asarray(scale.relayed.from_relay)[of_expert].max()
    return time + xp.asarray(scale.relayed.table)[xp.maximum(xp.maximum(homes, relays), received(plan).max())]


def lowest_max_load(plan: Plan) -> IntScalar:
    """Return a lower bound on the maximum load: the mean load of the busiest domain, rounded up."""
    tokens = load(plan).reshape(-1, plan.domain).sum(1, dtype=np.int32).max()
    return (tokens - np.int32(1)) // np.int32(plan.domain) + np.int32(1)


def _known(name: str, value: float | None) -> float:
    if value is None:
        raise ValueError(f"Cost.{name} is None; expected a number outside a layer")
    return value


def _name(level: Level) -> str:
    return f"Level({level.name!r}).bytes_per_s"


def _rate(name: str, value: float | None) -> float:
    if value is None or not math.isfinite(value):
        raise ValueError(f"{name} is {value}; expected a finite rate for the cost model")
    return value
