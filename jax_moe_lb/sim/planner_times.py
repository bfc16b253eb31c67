"""Times of planners where they run, from a table written by a benchmark.

`planner_times.yaml` has one row per balancer, place and size, written by `python -m benchmarks.plans plans
planners --write`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources

from jax_moe_lb.balancers.base import Balancer, Plain
from jax_moe_lb.balancers.eplb import EPLB, EPLBPlus
from jax_moe_lb.balancers.exact import Exact
from jax_moe_lb.balancers.fastermoe import FasterMoE
from jax_moe_lb.balancers.feplb import FEPLB
from jax_moe_lb.balancers.given import Given
from jax_moe_lb.balancers.greedy import Greedy
from jax_moe_lb.balancers.hybridep import HybridEP
from jax_moe_lb.balancers.rails import RailS
from jax_moe_lb.balancers.ultraep import UltraEP
from jax_moe_lb.core.quantities import time
from jax_moe_lb.recordings.yaml_file import read_yaml

MOST_KERNEL_RANKS = 128
"""Largest domain that a kernel plans; `ffi/planning/device` has the same limit."""

FILE = "planner_times.yaml"


class Place(StrEnum):
    """Place where a balancer plans."""

    NATIVE = "C++ on the host"  # C++ on the host, as a custom call or a host function of the stream
    KERNEL = "one kernel"  # one kernel of an NVIDIA GPU
    PYTHON = "Python on the host"  # python on the host, such as a linear program
    JNP = "jnp"  # operations of the program
    NOWHERE = "nowhere"  # no planner; plans do not depend on the counts

    @property
    def waits_for_host(self) -> bool:
        """Whether the device copies counts to the host and waits for the plan."""
        return self in (Place.NATIVE, Place.PYTHON)


PLACES: dict[type[Balancer], Place] = {
    **dict.fromkeys((Exact, EPLB, EPLBPlus, FasterMoE, FEPLB, Greedy, RailS, UltraEP), Place.NATIVE),
    **dict.fromkeys((Given, HybridEP, Plain), Place.NOWHERE),
}
"""Place where balancers of a class plan on GPUs; those of other classes are operations of the program."""

WITH_KERNEL = (Exact, UltraEP)
"""Balancers that NVIDIA GPUs run as one kernel; see `fits_kernel` of the planners."""


@dataclass(frozen=True)
class PlannerTime:
    """Time of one planner for one size."""

    planner: str  # class of the balancer
    place: Place  # place where it runs
    ranks: int  # `R`, all in one domain
    experts: int  # `E`
    slots: int  # replica slots per rank
    time: float  # seconds from counts to plan, without copies between device and host


@cache
def planner_times() -> tuple[PlannerTime, ...]:
    """Read the table of the package."""
    with resources.as_file(resources.files(__package__) / FILE) as path:
        rows = read_yaml(path)["rows"]
    return tuple(PlannerTime(**row | {"place": Place(row["place"]), "time": time(row["time"])}) for row in rows)


def planner_time(planner: str, place: Place, num_ranks: int, num_experts: int) -> PlannerTime:
    """Return the row of a planner for the nearest size."""
    rows = [row for row in planner_times() if row.place is place]
    own = [row for row in rows if row.planner == planner]
    if not rows:
        raise ValueError(f"place is {place!r}; expected one of {sorted({row.place.value for row in planner_times()})}")

    def distance(row: PlannerTime) -> float:
        return abs(math.log(row.ranks / num_ranks)) + abs(math.log(row.experts / num_experts))

    nearest = min(map(distance, own or rows))
    return max((row for row in own or rows if distance(row) == nearest), key=lambda row: row.time)


def needs_counts(balancer: Balancer) -> bool:
    """Return whether the placement depends on the load."""
    # If not, no planner runs between router and dispatch, and weights can be transferred before routing is known.
    return any(place_of(one) is not Place.NOWHERE for one in _members(balancer))


def planning_s(balancer: Balancer, num_ranks: int, domain: int, num_experts: int, host_wait_s: float) -> float:
    """Return the seconds from counts to plan where a balancer plans, by the table."""
    return sum(_one_s(one, num_ranks, domain, num_experts, host_wait_s) for one in _members(balancer))


def _one_s(balancer: Balancer, num_ranks: int, domain: int, num_experts: int, host_wait_s: float) -> float:
    name = type(balancer).__name__
    if isinstance(balancer, WITH_KERNEL) and domain <= MOST_KERNEL_RANKS:
        # A block plans each domain, all of them at once. Its time grows with the ranks beyond the largest row.
        row = planner_time(name, Place.KERNEL, domain, num_experts * domain // num_ranks)
        return row.time * max(1.0, domain / row.ranks)
    place = place_of(balancer)
    if place is Place.NOWHERE:
        return 0.0
    return planner_time(name, place, num_ranks, num_experts).time + host_wait_s * place.waits_for_host


def _members(balancer: Balancer) -> Sequence[Balancer]:
    """Return the balancers of a chain, or the balancer itself."""
    return getattr(balancer, "balancers", (balancer,))


def place_of(balancer: Balancer) -> Place:
    """Return the place where a balancer plans on GPUs, of the nearest class in `PLACES`."""
    # A planner called on the host keeps its errors.
    if balancer.host_errors:
        return Place.PYTHON
    return next((PLACES[kind] for kind in type(balancer).__mro__ if kind in PLACES), Place.JNP)
