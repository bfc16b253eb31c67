"""Times of planners where they run, from a table written by a benchmark.

`planner_times.yaml` has one row for each balancer, place and size, written by `python -m benchmarks.bench_planner_times
--write`.
"""

import math
from enum import StrEnum
from functools import cache
from importlib import resources

from pydantic import BaseModel, ConfigDict

from jax_moe_lb.recordings.quantities import TimeField
from jax_moe_lb.recordings.yaml_file import read_yaml

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
        >>> from jax_moe_lb.recordings.planner_times import Place, planner_time
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
