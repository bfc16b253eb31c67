"""The estimate of the time left, from the times of earlier runs."""

import json

import pytest

from benchmarks.reproduce.progress import Pace, Seconds, shown_progress


@pytest.fixture
def pace(tmp_path):
    file = tmp_path / "seconds.json"
    file.write_text(json.dumps({"full": {"a": [100.0, 80.0], "b": [40.0, 90.0]}, "quick": {"a": [1.0, 1.0]}}))
    return Pace("full", ["a", "b"], file)


def test_a_run_on_a_busy_machine_counts_by_its_processor_time(pace):
    assert (pace.expected_s("a"), pace.expected_s("b"), pace.total_s) == (80.0, 40.0, 120.0)


def test_the_time_left_follows_the_pace_of_this_run(pace):
    assert pace.left_s() == 120.0
    assert pace.left_s("a", 20.0) == 100.0
    pace.end("a", Seconds(160.0, 80.0), 160.0)
    # Everything takes twice as long as before.
    assert pace.left_s() == 80.0
    assert pace.left_s("b", 20.0) == 60.0


def test_a_benchmark_that_takes_longer_than_before_has_not_ended(pace):
    assert 0 < pace.left_s("a", 1e6) < 120.0
    assert pace.done_s("a", 1e6) < 80.0


def test_the_times_of_a_run_are_kept_for_the_next_one(pace):
    pace.end("a", Seconds(60.0, 50.0), 60.0)
    pace.end("b", None, 40.0)
    again = Pace("full", ["a", "b", "new"], pace.file)
    assert again.known == {"a": (60.0, 50.0), "b": (40.0, 90.0)}
    assert Pace("quick", ["a"], pace.file).known == {"a": (1.0, 1.0)}
    assert again.table().rows[-1] == ["all of these", 100.0, 140.0]
    assert "new" in again.table().notes[0]


def test_a_benchmark_that_is_left_out_takes_no_time(pace, capsys):
    pace.end("a", Seconds(160.0, 80.0), 160.0)
    assert pace.will_take_s("b") == 80.0
    with shown_progress(pace) as progress:
        progress.leave_out("b", "left out: no time")
    assert pace.left_s() == 0.0
    assert "b: left out: no time" in capsys.readouterr().out


def test_every_end_has_a_line_with_the_time_left(pace, capsys):
    with shown_progress(pace) as progress:
        progress.during("a")(30.0)
        progress.end("a", "80 s", Seconds(80.0, 80.0))
    assert "a: 80 s; 1 min left" in capsys.readouterr().out
