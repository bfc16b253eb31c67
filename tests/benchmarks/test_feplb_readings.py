"""Readings of FEPLB's scheduler: correct plans, and the statements of the pages about the selected one."""

import numpy as np
import pytest

from benchmarks.papers.feplb import feplb, straggler
from benchmarks.papers.feplb_readings import (
    KINDS,
    Loads,
    Reading,
    error,
    one_changed,
    rises,
    straggler_after,
)
from benchmarks.papers.stragglers import CASES, counts, zipf
from jax_moe_lb.balancers import FEPLB

# Four ranks with a mean load of 5.75.
WORKED = np.zeros((1, 4, 12), np.int32)
WORKED[0, 0] = 6, 4, 3, 4, 1, 0, 2, 1, 0, 1, 1, 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.num_ranks} ranks")
@pytest.mark.parametrize(("tau", "skip"), [(1, False), (1, True), (2048, True)])
@pytest.mark.parametrize("num_dynamic", [2, 8])
def test_the_readings_that_the_library_has_are_its_own(case, tau, skip, num_dynamic):
    loads = counts(case, 0, 50)
    balancer = FEPLB(num_dynamic=num_dynamic, tau=tau, skip=skip)
    found = straggler_after(loads, Reading(tau=tau, skip=skip), num_dynamic)
    np.testing.assert_array_equal(found, straggler(feplb(loads, balancer)))


@pytest.mark.parametrize(
    ("reading", "num_dynamic", "highest"),
    [
        (Reading(), 3, 7),  # 6 to rank 3, then its own 1 to rank 2
        (Reading(tau=2), 3, 8),  # this 1 stays
        (Reading(accept="donor >= mean"), 3, 7),
        (Reading(accept="taker <= donor"), 3, 13),  # rank 3 would have 8, above 7
        (Reading(accept="taker <= donor", skip=True), 3, 6),  # 4 to rank 3, 3 to rank 2
    ],
)
def test_a_case_by_hand(reading, num_dynamic, highest):
    assert straggler_after(WORKED, reading, num_dynamic) == highest - 5.75


def test_fixed_experts_are_the_first_ones():
    """Rank 0 may move only the expert with 3 tokens, to rank 3."""
    loads = WORKED.copy()
    loads[0, 0, :3] = 3, 4, 6
    assert straggler_after(loads, Reading("fixed, first"), 1) == 10 - 5.75
    assert straggler_after(loads, Reading("busiest"), 1) == 7 - 5.75


def test_loads_of_another_shape_have_the_published_straggler():
    for case in CASES:
        loads = counts(case, 0, 200, 16384, zipf).sum(1, dtype=np.int64)
        load = loads.reshape(200, case.num_ranks, -1).sum(2)
        np.testing.assert_allclose((load.max(1) - load.mean(1)).mean(), case.straggler, rtol=0.02)


def test_there_are_no_two_alike():
    every = list(one_changed())
    assert len(set(every)) == len(every)


def test_what_the_pages_say_of_the_selection():
    kinds = {name: Loads(kind, 200) for name, kind in KINDS.items()}

    def find(reading):
        return [kind.find(reading) for kind in kinds.values()]

    default, fixed = find(Reading()), find(Reading("fixed, first"))
    # A fixed subset has the published trend over ranks on all loads, but a larger error over all points.
    assert all(map(rises, fixed))
    assert not any(map(rises, default))
    assert error(np.stack(default)) + 3 < error(np.stack(fixed))
    # With a threshold the busiest experts have the trend too, with a smaller error on the simulator's loads.
    simulated = kinds["lognormal, 16384"]
    threshold = simulated.find(Reading(tau=1792))
    assert rises(threshold)
    assert error(threshold) + 4 < min(error(simulated.find(one)) for one in (Reading(), Reading("fixed, first")))
    # However, no single threshold fits all loads.
    assert error(kinds["zipf, 16384"].find(Reading(tau=1792))) > error(default[2])
