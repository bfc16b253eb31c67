"""Namespace networks have the requested rates, count traffic, and end cleanly."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.network import sandbox
from benchmarks.network.launch import launch
from benchmarks.network.links import Interface
from benchmarks.network.network import Network
from benchmarks.network.shaping import payload_bytes_per_s, set_rate
from tests.network.programs import NUM_BYTES
from tests.network.sandboxed import ROOT, command, needs_sandbox, run


@pytest.mark.slow
@pytest.mark.netns
def test_a_link_carries_its_rate_and_counts_what_it_carries():
    forth, back, inside, unlimited = run("two_datacenters")
    for result, end in ((forth, 0), (back, 1)):
        assert result["sent_bytes"][end] == pytest.approx(NUM_BYTES, rel=0.03)
        assert result["sent_bytes"][1 - end] < 0.1 * NUM_BYTES  # acknowledgements
        assert result["seconds"] == pytest.approx(NUM_BYTES / payload_bytes_per_s(20e6), rel=0.25)
    assert max(inside["sent_bytes"]) < 5000
    assert max(inside["seconds"], unlimited["seconds"]) < 0.5 * forth["seconds"]


@pytest.mark.netns
@pytest.mark.thorough
def test_packets_leave_by_the_nic_that_the_topology_says():
    sent = {name: [round(nic / NUM_BYTES, 1) for nic in nics] for name, nics in run("rails").items()}
    assert [sent[f"spine {to}"] for to in (1, 2, 3)] == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    assert [sent[f"switch {to}"] for to in (1, 2, 3)] == [[1, 0, 0, 0]] * 3
    # A connection uses either of the node's interfaces.
    assert [sorted(sent[f"multipath {to}"][:2]) for to in (1, 2, 3)] == [[0, 0], [0, 1], [0, 1]]


@pytest.mark.netns
@pytest.mark.thorough
def test_ranks_that_fail_are_named_at_once():
    killed, raised, late = run("failures")
    assert "rank 1 was ended by SIGKILL" in killed["message"]
    assert "rank 0 was" not in killed["message"]
    assert "ranks 0 were still running" in killed["message"]
    assert "rank 0 failed" in raised["message"]
    assert "ValueError: the wrong number of tokens: 17" in raised["message"]
    assert "ranks 1 were not done after 2 s" in late["message"]
    assert "rank 1 wrote last:\nstill waiting" in late["message"]
    assert max(killed["seconds"], raised["seconds"]) < 5


@pytest.mark.netns
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.thorough
def test_nothing_is_left_when_the_parent_is_killed(number):
    needs_sandbox()
    token = f"{os.getpid()}-{number}"
    parent = subprocess.Popen(command("wait", token), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert sorted(parent.stdout.readline() for _ in range(4)) == [f"rank {i} is there\n" for i in range(4)]
    running = processes_of(token)
    assert len(running) >= 6
    if number == signal.SIGTERM:
        # Like `timeout`, send it to the group, as `unshare` waits for its child.
        for pid in running:
            os.kill(pid, number)
    else:
        parent.send_signal(number)
    parent.wait(timeout=10)
    end_s = time.monotonic() + 10
    while processes_of(token) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert processes_of(token) == []


def processes_of(token):
    """Return processes with the token in their command line, which forked ranks inherit."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += [int(path.parent.name)] if token.encode() in line.split(b"\0") else []
    return found


@pytest.mark.parametrize("rate", [0, -1e8, 100, float("nan"), float("inf")])
def test_impossible_rates_are_refused_by_name(rate):
    message = r"bits_per_s is \S+; expected bits per second, finite and at least 1000000"
    with pytest.raises(ValueError, match=message):
        set_rate(Interface("no namespace", "no device"), rate)


def test_ranks_outside_a_sandbox_are_refused():
    with pytest.raises(RuntimeError, match="outside a sandbox"):
        launch(Network((), (), ()), print, deadline_s=1)


def test_a_missing_tool_is_named(monkeypatch):
    monkeypatch.setattr(sandbox, "TOOLS", ("unshare", "no-such-tool"))
    sandbox.missing.cache_clear()
    try:
        assert sandbox.missing().endswith("no no-such-tool on the PATH")
    finally:
        sandbox.missing.cache_clear()


@pytest.mark.netns
def test_a_step_that_fails_is_quoted(monkeypatch):
    needs_sandbox()
    monkeypatch.setattr(sandbox, "PROBE", sandbox.PROBE.replace("htb default 20", "no_such_kind"))
    sandbox.missing.cache_clear()
    try:
        assert "`tc qdisc add dev probe0 root handle 1: no_such_kind`: " in sandbox.missing()
    finally:
        sandbox.missing.cache_clear()
