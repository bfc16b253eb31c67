"""A failed system call ends a command with one line, loses nothing, and lets the next command succeed.

`python -m tests.faults.run train 1` fails every call of training. Sockets of GPU processes: `sockets_test.cc`.
"""

import pytest

from tests.faults.run import ERRORS, failures
from tests.faults.workers import KINDS, Faults
from tests.marks import parametrize

pytestmark = pytest.mark.slow


@parametrize("name, step", [("convert", 4)], [("convert", 1), ("calibrate", 1), ("train", 60), ("resume", 60)])
def test_failed_calls(name, step, tmp_path):
    tried = list(failures(name, step, tmp_path))
    assert [one for one in tried if one.faults] == []
    # Each of these commands replaces a file by a synced one.
    assert {one.kind for one in tried} >= {"write", "sync", "rename", "open"}


def test_a_failed_call_reaches_the_command(tmp_path):
    """Of each kind with a call, and with each error."""
    with Faults(tmp_path) as faults:
        faults.clear()
        assert faults.run("convert") == (0, [])
        counts = faults.counts()
        for kind in ("write", "sync", "open"):
            assert counts[kind] > 0
            faults.clear()
            code, lines = faults.run("convert", kind, counts[kind] - 1, "EIO")
            assert (code, len(lines)) == (2, 1)
            assert "Input/output error" in lines[0]
    assert set(counts) == set(KINDS)
    assert len(set(ERRORS)) == 5
