"""The simulator's memory matches programs compiled by a benchmark."""

from pathlib import Path

import pytest

from benchmarks.compiled.memory_model import AGREES, CASES, compiled_gb

FOUND = Path(__file__).parents[2] / "benchmarks" / "results" / "memory_model.json"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_memory_is_near_that_of_compiled_programs(case):
    assert case.predicted().total / 1e9 == pytest.approx(compiled_gb(FOUND)[case.name], rel=AGREES)
