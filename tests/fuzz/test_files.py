"""Mutated files of every kind are read to legal data or refused in one line, within 5 s and 1 GB."""

import dataclasses

import numpy as np
import pytest

from tests.fuzz.kinds import KINDS, Kind, digest
from tests.fuzz.run import failures, fuzzed
from tests.fuzz.worker import LEGAL, REFUSED, SAME, Sample, case, kind_of

SEED = 0


@pytest.mark.slow
def test_mutated_files():
    assert failures(fuzzed(SEED, 200)) == []


@pytest.mark.thorough
def test_more_mutated_files(pytestconfig):
    number = pytestconfig.getoption("--fuzz-files")
    seed = pytestconfig.getoption("--fuzz-seed")
    results = fuzzed(seed, number)
    assert [result.index for result in results] == list(range(number))
    assert failures(results) == []
    assert {result.kind for result in results} == set(KINDS)
    assert {result.outcome for result in results} == {SAME, LEGAL, REFUSED}


def raises(error):
    def read(folder):
        if (folder / "data.bin").read_text() != "valid":
            raise error

    return Kind(lambda folder: (folder / "data.bin").write_text("valid"), read, lambda value: False)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError("data.bin has 3 values; expected 2"), REFUSED),
        (ValueError("3 values; expected 2"), "message"),
        (ValueError("data.bin has\nlines"), "message"),
        (ValueError("data.bin" * 200), "message"),
        (KeyError("x"), "KeyError"),
        (MemoryError(), "MemoryError"),
        (SystemExit("x"), "SystemExit"),
    ],
)
def test_errors_of_readers_are_judged(tmp_path, error, outcome):
    assert Sample(raises(error), tmp_path / "sample").outcome(0, b"other")[0] == outcome


@pytest.mark.parametrize(("is_legal", "outcome"), [(True, LEGAL), (False, "illegal value")])
def test_values_of_readers_are_judged(tmp_path, is_legal, outcome):
    kind = Kind(lambda at: (at / "x").write_text("a"), lambda at: (at / "x").read_bytes(), lambda value: is_legal)
    sample = Sample(kind, tmp_path / "sample")
    assert sample.outcome(0, b"a")[0] == SAME
    assert sample.outcome(0, b"b")[0] == outcome


def test_a_case_follows_from_seed_and_index(tmp_path):
    samples = {
        name: Sample(kind, tmp_path / str(number)) for number, (name, kind) in enumerate(list(KINDS.items())[:3])
    }
    assert case(1, 7, samples) == case(1, 7, samples)
    assert case(1, 7, samples) != case(2, 7, samples)
    assert {kind_of(0, index) for index in range(1000)} == set(KINDS)


def test_digests_differ_with_any_part():
    part = dataclasses.make_dataclass("Part", ["value"])
    values = [1, 1.0, "1", None, True, [1], [[1]], [1, 1], {"a": 1}, {"a": 2}, part(1), part(2), np.zeros(2)]
    values += [np.ones(2), np.ones(2, np.int32), np.ones((2, 1))]
    assert len({digest(value) for value in values}) == len(values)
