"""The simulator's memory matches programs compiled by a benchmark."""

import pytest

from benchmarks.compiled.memory_model import AGREES, CASES
from benchmarks.render.documents import RESULTS
from benchmarks.render.results import load

COMPILED_GB = {row["layers"]: row["compiled GB"] for row in load(RESULTS / "memory_model.json")["compared"].dicts()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_memory_is_near_that_of_compiled_programs(case):
    assert case.predicted().total / 1e9 == pytest.approx(COMPILED_GB[case.name], rel=AGREES)
