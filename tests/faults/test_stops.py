"""Interrupts and a second writer lose nothing; `python -m tests.faults.stops` makes more tries."""

import pytest

from tests.faults.stops import PER_RUN, interrupts, writers

pytestmark = pytest.mark.thorough


def test_interrupted_runs_continue(tmp_path):
    tries = list(interrupts(PER_RUN, 0, tmp_path))
    assert tries == [[]] * PER_RUN


def test_two_writers_of_one_folder(tmp_path):
    assert list(writers(2, 0, tmp_path)) == [[], []]
