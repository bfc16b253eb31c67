"""A stopped process is named by those that wait for it, and continues or ends in one line."""

import os
import re
import select
import signal
import socket

import pytest

from models.multi_process.rendezvous import relay_to
from models.multi_process.stalls import BEAT_S, LIMIT_INTERVALS, LIMIT_S, SILENT_S, Stall, StallDetector, StallLines
from tests.models.processes import end, joined

A, B, C = NAMES = [f"process {i} (pid {i} on h)" for i in range(3)]
PROMISED_S = 30
TIMEOUT_S = 12


class Run:
    """Detector of one process of three; it looks every `BEAT_S` seconds."""

    def __init__(self):
        self.now, self.steps = 0.0, dict.fromkeys(NAMES, 0)
        self.detector = StallDetector(NAMES, lambda: self.now)

    def go_on(self, seconds, *silent):
        for _ in range(round(seconds / BEAT_S)):
            self.now += BEAT_S
            for name in self.steps.keys() - set(silent):
                self.detector.hear(name, self.steps[name])
            found = self.detector.stall()
        return found

    def step(self, step, *names):
        self.steps |= dict.fromkeys(names or NAMES, step)


def test_a_silent_process_is_named_from_its_last_message_on():
    run = Run()
    assert run.go_on(600) is None
    assert run.go_on(SILENT_S, B) is None
    assert str(run.go_on(15, B)) == f"waiting for {B} for 20 s, before step 1"
    run.step(7)
    assert run.go_on(BEAT_S) is None
    assert str(run.go_on(20, B, C)) == f"waiting for {B} and 1 more for 20 s, at step 7"


def test_a_late_process_is_named_though_it_responds():
    run = Run()
    run.step(7)
    run.go_on(9)
    run.step(8, A, C)
    assert str(run.go_on(21)) == f"waiting for {B} for 20 s, at step 8"
    run.step(8)
    run.go_on(1)
    run.step(9)
    assert run.go_on(1) is None


def test_without_a_late_process_three_steps_pass_first():
    run = Run()
    for step in (1, 2):
        run.step(step)
        run.go_on(30)
    run.step(3)
    assert run.go_on(90) is None
    assert str(run.go_on(1)) == "waiting, although all 3 processes respond, for 90 s, at step 3"


def test_a_run_of_responding_processes_has_a_limit():
    run = Run()
    assert run.go_on(10 * LIMIT_S) is None
    for step in (1, 2, 3):
        run.step(step)
        run.go_on(1)
    # The longest interval has compiled.
    assert run.go_on(600).limit_s == LIMIT_INTERVALS * (10 * LIMIT_S + BEAT_S)
    assert run.go_on(LIMIT_S, B).limit_s is None


def test_the_limit_of_short_steps_is_half_an_hour():
    run = Run()
    for step in (1, 2):
        run.step(step)
        run.go_on(60)
    assert run.go_on(600).limit_s == LIMIT_S == 1800
    run.step(3, A, C)
    run.go_on(1)
    assert (run.go_on(9).cause, run.go_on(1).limit_s) == (f"waiting for {B}", LIMIT_INTERVALS * 660)


def test_a_process_that_was_stopped_accuses_no_other():
    run = Run()
    run.step(3)
    run.go_on(5)
    run.now += 60
    assert (run.detector.stall(), run.detector.silent()) == (None, [])
    assert run.go_on(2, B, C) is None
    assert run.go_on(SILENT_S, B, C).cause == f"waiting for {B} and 1 more"


def test_lines_come_at_increasing_intervals_and_once_at_the_end():
    run, lines, shown = Run(), StallLines(None), {}
    run.step(2)
    run.go_on(1)
    for second in range(100):
        shown[second] = lines.line(run.go_on(1, B))
    assert [second + 1 for second, line in shown.items() if line] == [20, 40, 80]
    assert lines.line(run.go_on(1)) == f"the run continues: waiting for {B} took more than 80 s"
    assert lines.line(run.go_on(1)) is None
    assert StallLines(12).first_s == 6


def test_a_stall_that_is_detected_late_has_one_line():
    lines = StallLines(None)
    shown = [age for age in range(300, 700) if lines.line(Stall("waiting", age, 1))]
    assert shown == [300, 320, 640]


def test_the_relay_hides_a_closed_connection_and_passes_on_the_rest():
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = relay_to(*server.getsockname()[:2]).split(":")
        inner = socket.create_connection((host, int(port)))
        outer, _ = server.accept()
    inner.sendall(b"question")
    assert outer.recv(100) == b"question"
    outer.sendall(b"answer")
    assert inner.recv(100) == b"answer"
    outer.close()
    assert not select.select([inner], [], [], 0.5)[0]
    inner.close()


@pytest.mark.thorough
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_process_ends_the_run_after_the_timeout(stopped):
    """The stopped process ends in one line when it continues, although all its connections are closed."""
    processes = joined(*["wait"] * 3, stall_timeout_s=TIMEOUT_S)
    os.kill(processes[stopped].pid, signal.SIGSTOP)
    others = [process for process in processes if process is not processes[stopped]]
    cause = rf"waiting for process {stopped} \(pid {processes[stopped].pid} on \S+\) for \d+ s, before step 1"
    for code, _, errors in end(others, PROMISED_S + TIMEOUT_S):
        assert code == 1
        _, waiting, ending = errors.splitlines()
        assert re.fullmatch(cause, waiting)
        assert re.fullmatch(f"error: {cause}; --resume continues from the newest checkpoint", ending)
    os.kill(processes[stopped].pid, signal.SIGCONT)
    ((code, _, errors),) = end([processes[stopped]], PROMISED_S)
    assert code == 1
    assert len(errors.splitlines()) == 2
    assert re.fullmatch(f"error: {cause}; --resume .*", errors.splitlines()[-1])


@pytest.mark.slow
def test_a_step_that_never_ends_ends_the_run_by_default():
    line = r"error: waiting, although all 2 processes respond, for \d+ s, at step 1; --resume continues .*"
    for code, _, errors in end(joined("stuck", "stuck"), PROMISED_S):
        assert code == 1
        assert re.fullmatch(line, errors.splitlines()[-1])
        assert len(errors.splitlines()) == 2
