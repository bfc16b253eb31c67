"""Times of planners where they run, from a table written by a benchmark.

`planner_times.yaml` has one row for each balancer, place and size, written by `python -m benchmarks.bench_plans
planners --write`.
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from functools import cache
from importlib import resources

from pydantic import BaseModel, ConfigDict

from jax_moe_lb.balancers.base import Balancer, Plain
from jax_moe_lb.balancers.eplb import EPLB, EPLBPlus
from jax_moe_lb.balancers.exact import Exact
from jax_moe_lb.balancers.fastermoe import FasterMoE
from jax_moe_lb.balancers.feplb import FEPLB
from jax_moe_lb.balancers.given import Given
from jax_moe_lb.balancers.greedy import Greedy
from jax_moe_lb.balancers.host_callback import HostCallback, PlannedOnHost
from jax_moe_lb.balancers.hybridep import HybridEP
from jax_moe_lb.balancers.rails import RailS
from jax_moe_lb.balancers.ultraep import UltraEP
from jax_moe_lb.contrib.lplb import LPLB
from jax_moe_lb.recordings.yaml_file import read_yaml
from jax_moe_lb.sim.quantity_fields import TimeField

MOST_KERNEL_RANKS = 64
"""Largest domain whose plan is priced as one of a kernel; the rows of kernels end there."""

FILE = "planner_times.yaml"


class Place(StrEnum):
    """Place where a balancer plans.

    Attributes:
        NATIVE: C++ on the host, as a custom call or a host function of the stream.
        KERNEL: One kernel of an NVIDIA GPU.
        PYTHON: Python on the host, such as a linear program.
        JNP: Operations of the program.
        NOWHERE: No planner; plans do not depend on the counts.
    """

    NATIVE = "C++ on the host"
    KERNEL = "one kernel"
    PYTHON = "Python on the host"
    JNP = "jnp"
    NOWHERE = "nowhere"

    @property
    def waits_for_host(self) -> bool:
        """Whether the device copies counts to the host and waits for the plan."""
        return self in (Place.NATIVE, Place.PYTHON)


PLACES: dict[type[Balancer], Place] = {
    **dict.fromkeys((Exact, EPLB, EPLBPlus, FasterMoE, FEPLB, Greedy, RailS, UltraEP), Place.NATIVE),
    **dict.fromkeys((HostCallback, LPLB, PlannedOnHost), Place.PYTHON),
    **dict.fromkeys((Given, HybridEP, Plain), Place.NOWHERE),
}
"""Place where balancers of a class plan on GPUs; those of other classes are operations of the program."""

WITH_KERNEL = (Exact, FEPLB, Greedy, UltraEP)
"""Balancers that NVIDIA GPUs run as one kernel; see `fits_kernel` of their planners."""


class PlannerTime(BaseModel):
    """Time of one planner for one size.

    Args:
        planner: Class of the balancer.
        place: Place where it runs.
        ranks: `R`, all in one domain.
        experts: `E`.
        slots: Replica slots per rank.
        time: Seconds from counts to plan, without copies between device and host.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    planner: str
    place: Place
    ranks: int
    experts: int
    slots: int
    time: TimeField


@cache
def planner_times() -> tuple[PlannerTime, ...]:
    """Read the table of the package."""
    with resources.as_file(resources.files(__package__) / FILE) as path:
        return tuple(PlannerTime.model_validate(row) for row in read_yaml(path)["rows"])


def planner_time(planner: str, place: Place, num_ranks: int, num_experts: int) -> PlannerTime:
    """Return the row of a planner for the nearest size.

    Args:
        planner: Class of the balancer, such as `"Exact"`. A class without rows gets the slowest row of its place.
        place: Place where it runs.
        num_ranks: `R`.
        num_experts: `E`.

    Raises:
        ValueError: No planner has a row of this place.

    Examples:
        >>> from jax_moe_lb.sim.planner_times import Place, planner_time
        >>> planner_time("Exact", Place.NATIVE, num_ranks=60, num_experts=240).ranks
        64
        >>> planner_time("LPLB", Place.PYTHON, 8, 64).time > 1e-3
        True
    """
    rows = [row for row in planner_times() if row.place is place]
    own = [row for row in rows if row.planner == planner]
    if not rows:
        raise ValueError(f"place is {place!r}; expected one of {sorted({row.place.value for row in planner_times()})}")

    def distance(row: PlannerTime) -> float:
        return abs(math.log(row.ranks / num_ranks)) + abs(math.log(row.experts / num_experts))

    nearest = min(map(distance, own or rows))
    return max((row for row in own or rows if distance(row) == nearest), key=lambda row: row.time)


def needs_counts(balancer: Balancer) -> bool:
    """Return whether the placement depends on the load.

    If not, no planner runs between router and dispatch, and weights can be transferred before routing is known.

    Args:
        balancer: any balancer, or a `Chain`.

    Examples:
        >>> needs_counts(Greedy()), needs_counts(Plain())
        (True, False)
    """
    return any(place_of(one) is not Place.NOWHERE for one in _members(balancer))


def planning_s(balancer: Balancer, num_ranks: int, num_experts: int, host_wait_s: float) -> float:
    """Return the seconds from counts to plan where a balancer plans, by the table.

    Args:
        balancer: any balancer, or a `Chain`, whose times add up.
        num_ranks: `R`.
        num_experts: `E`.
        host_wait_s: seconds in which the device copies counts to the host and waits for it, for planners there.
    """
    return sum(_one_s(one, num_ranks, num_experts, host_wait_s) for one in _members(balancer))


def _one_s(balancer: Balancer, num_ranks: int, num_experts: int, host_wait_s: float) -> float:
    """Return the time of one balancer."""
    in_kernel = isinstance(balancer, WITH_KERNEL) and num_ranks <= MOST_KERNEL_RANKS
    place = Place.KERNEL if in_kernel else place_of(balancer)
    if place is Place.NOWHERE:
        return 0.0
    row = planner_time(type(balancer).__name__, place, num_ranks, num_experts)
    return row.time + host_wait_s * place.waits_for_host


def _members(balancer: Balancer) -> Sequence[Balancer]:
    """Return the balancers of a chain, or the balancer itself."""
    return getattr(balancer, "balancers", (balancer,))


def place_of(balancer: Balancer) -> Place:
    """Return the place where a balancer plans on GPUs, of its nearest class in `PLACES`."""
    return next((PLACES[kind] for kind in type(balancer).__mro__ if kind in PLACES), Place.JNP)
