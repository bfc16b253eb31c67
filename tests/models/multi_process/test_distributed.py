"""Processes of a run start together or not at all, and end together with a message."""

import re
import signal
import socket
import threading
import time
from types import SimpleNamespace

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from typer.testing import CliRunner

from models import mesh
from models.config import ParallelConfig
from models.console import UserError
from models.multi_process.peer_monitor import agree
from models.multi_process.rendezvous import KEEPALIVE, Link, Place, detect_process, gather, listen, wait_for_processes
from models.run_folder.checkpoints import steps_in
from models.run_folder.metrics import RunFolder
from models.train import app
from tests.models.kill_training import MAX_WAIT_S, wait_for_steps
from tests.models.processes import end, free_port, joined, multi_process, place, train

PROMISED_S = 20
"""Maximum seconds until all processes have ended after one is gone."""

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def refusal(*arguments):
    """Return the last line of a failed start; only waiting messages may precede it."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2
    assert result.stdout == ""
    *before, line = result.stderr.splitlines()
    assert all(text.startswith("waiting for 2 processes at 127.0.0.1:") for text in before)
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


ADDRESSES = ["garbage", ":9911", "a b:9911", "http://a:9911", "::1:9911", "a:", "a:b", "a:0", "a:65536"]


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_that_is_none_is_refused(address, monkeypatch):
    rest = ("--distributed", *multi_process(num_processes=2, process_id=1))
    expected = f"multi_process.coordinator is {address!r}; expected HOST:PORT"
    assert refusal(*multi_process(coordinator=address), *rest).startswith(expected)
    for text in (address, ""):
        monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", text)
        assert refusal(*rest).startswith(f"JAX_COORDINATOR_ADDRESS is {text!r}; expected HOST:PORT")


@pytest.mark.parametrize(
    ("num_processes", "process_id", "message"),
    [
        (0, 0, "multi_process.num_processes is 0; expected at least 1"),
        (2, 2, "multi_process.process_id is 2; expected 0 to 1, as num_processes is 2"),
        (2, -1, "multi_process.process_id is -1; expected 0 to 1, as num_processes is 2"),
    ],
)
def test_a_process_that_is_none_is_refused(num_processes, process_id, message):
    assert refusal(*place(9911, num_processes, process_id)) == message


def test_what_the_environment_says_is_read_where_nothing_is_given(monkeypatch):
    for variable, value in zip(VARIABLES, ("[::1]:9911", "4", "3"), strict=True):
        monkeypatch.setenv(variable, value)
    assert detect_process(None, None, None, 1) == Place("::1", 9911, 4, 3)
    assert detect_process(None, None, None, 1).coordinator == "[::1]:9911"
    assert detect_process("a:1", 5, 0, 1) == Place("a", 1, 5, 0)
    monkeypatch.setenv("JAX_PROCESS_ID", "first")
    assert refusal("--distributed") == "JAX_PROCESS_ID is 'first'; expected a whole number"


def test_what_is_neither_given_nor_detected_is_named():
    line = refusal("--distributed", *multi_process(coordinator="a:9911"))
    assert "multi_process.num_processes, multi_process.process_id is neither given nor" in line
    assert "expected --set multi_process.coordinator=HOST:PORT, and so on" in line


def test_a_place_without_other_processes_is_refused():
    line = "multi_process.process_id is 0, but distributed is not set; expected --distributed with it"
    assert refusal(*multi_process(process_id=0)) == line


def test_a_coordinator_that_does_not_answer_is_refused_in_time():
    port, began = free_port(), time.monotonic()
    line = refusal(*place(port, 2, 1), *multi_process(join_timeout_s=0.5))
    assert time.monotonic() - began < 5
    assert line.startswith(f"multi_process.coordinator is '127.0.0.1:{port}', which did not answer within 0.5 s (")
    assert refusal(*place(port, 2, 1), *multi_process(join_timeout_s=0)) == (
        "multi_process.join_timeout_s is 0.0; expected a finite number above 0"
    )


def test_a_port_that_is_taken_is_refused():
    """JAX would share it with the other service."""
    with listen(0) as other:
        port = other.getsockname()[1]
        line = f"multi_process.coordinator is '127.0.0.1:{port}'; expected a port that is free"
        assert refusal(*place(port, 2, 0)).startswith(line)


class Shelf:
    """Store with values written by another process."""

    def __init__(self, **values):
        self.values = values

    def put(self, key, value):
        self.values[key] = value

    def get(self, key, timeout_s):
        return self.values[key]


def test_options_that_differ_are_named_with_their_values():
    others = '{"model.steps": 9, "seed": 0}', '{"model.steps": 8, "seed": 0, "new": 1}'
    shelf = Shelf(**{f"options/{number}": text for number, text in enumerate(others, 1)})
    with pytest.raises(UserError) as refused:
        agree(Place("a", 1, 3, 0), shelf, {"model": {"steps": 8}, "seed": 0})
    assert str(refused.value) == (
        "model.steps is 8 on processes 0, 2 and 9 on process 1; new is None on processes 0, 1 and 1 on process 2; "
        "expected the same on all processes"
    )
    with pytest.raises(UserError, match="steps is 8"):
        agree(Place("a", 1, 3, 1), shelf, {})
    agree(Place("a", 1, 1, 0), Shelf(), {"steps": 8})


def test_the_kernel_looks_after_a_machine_that_vanished():
    with socket.socket() as connection:
        Link(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        for name, value in KEEPALIVE.items():
            assert connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value
    idle, interval, count, unacknowledged_ms = KEEPALIVE.values()
    assert idle + interval * count == unacknowledged_ms / 1000 < PROMISED_S


def refusals(port, within_s, *others):
    """Return the refusals of process 0 of three, and of others that join it."""
    until, lines = time.monotonic() + within_s, []

    def meet(process_id, how):
        with pytest.raises(UserError) as refused:
            how(Place("127.0.0.1", port, 3, process_id), until, within_s)
        lines.append(str(refused.value))

    meetings = [(0, gather), *((process_id, wait_for_processes) for process_id in others)]
    threads = [threading.Thread(target=meet, args=meeting) for meeting in meetings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return lines


@pytest.mark.slow
def test_a_process_that_does_not_come_is_named_to_those_that_wait():
    port = free_port()
    said = f"multi_process.num_processes is 3, but process 2 did not connect to 127.0.0.1:{port} within 2 s; expected "
    assert [line[: len(said)] for line in refusals(port, 2, 1)] == [said] * 2


def test_a_process_id_that_comes_twice_is_refused_by_all():
    name = socket.gethostname()
    said = f"multi_process.process_id is 1 of a process on {name} and of one on {name}; expected 0 to 2, each once"
    assert refusals(free_port(), 60, 1, 1) == [said] * 3


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "2",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}


@pytest.mark.parametrize(("variables", "place"), [(SLURM, ("node07", 8, 5)), (OPEN_MPI, ("10.96.0.1", 4, 3))])
def test_schedulers_say_which_process_this_is(monkeypatch, variables, place):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = detect_process(None, None, None, 1)
    assert (found.host, found.num_processes, found.process_id) == place


@pytest.mark.slow
@pytest.mark.parametrize("killed", [2, pytest.param(0, marks=pytest.mark.thorough)])
def test_a_process_that_is_killed_is_named_by_all_others(killed):
    """JAX does not abort the others of process 0, as its connections lead through a relay."""
    processes = joined("wait", "wait", "wait")
    processes[killed].kill()
    ended = end(processes, PROMISED_S)
    line = rf"error: lost connection to process {killed} \(pid \d+ on \S+\); --resume .*"
    for code, _, errors in ended[:killed] + ended[killed + 1 :]:
        assert code == 1
        assert re.fullmatch(line, errors.splitlines()[-1])
        assert len(errors.splitlines()) == 2


@pytest.mark.thorough
def test_a_process_that_fails_says_why_to_all_others():
    first, failed, last = end(joined("wait", "fail", "wait"), PROMISED_S)
    for code, _, errors in (first, last):
        assert code == 1
        assert re.fullmatch(r"error: process 1 \(pid \d+ on \S+\) ended: no space left", errors.splitlines()[-1])
    assert failed[0] == 1
    assert failed[2].endswith("OSError: no space left\n")


@pytest.mark.thorough
def test_different_options_are_refused_by_all(tmp_path):
    for code, output, errors in end(train(folder=tmp_path, of_each=[("--steps", "8"), ("--steps", "9")]), MAX_WAIT_S):
        assert (code, output) == (2, "")
        assert len(errors.splitlines()) == 2
        assert errors.endswith("steps is 8 on process 0 and 9 on process 1; expected the same on all processes\n")
    assert not (tmp_path / "runs").exists()


@pytest.mark.thorough
def test_a_run_of_two_processes_is_killed_resumed_and_stopped(tmp_path):
    """The default folder is used, of which the first is taken."""
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    RunFolder(tmp_path / "runs" / "tiny").config.write_text("{}")
    folder, endless = RunFolder(tmp_path / "runs" / "tiny-2"), ("--steps", "100000")

    processes, until = train(*endless, folder=tmp_path), time.monotonic() + MAX_WAIT_S
    while not steps_in(folder.checkpoints) and processes[0].poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    processes[1].kill()
    (code, _, errors), _ = end(processes, PROMISED_S)
    assert code == 1, errors
    assert re.fullmatch(r"error: lost connection to process 1 \(pid \d+ on \S+\); --resume .*", errors.splitlines()[-1])

    processes = train(*endless, "--resume", folder=tmp_path)
    wait_for_steps(processes[0], folder.path)
    processes[1].send_signal(signal.SIGTERM)
    first, second = end(processes, MAX_WAIT_S)
    last = folder.rows("step")[-1]["step"]
    for code, _, errors in (first, second):
        assert code == 0, errors
        assert len(errors.splitlines()) == 1
    assert f"stopped by SIGTERM after step {last} of 100000; --resume continues in runs/tiny-2" in first[1]
    assert steps_in(folder.checkpoints)[0] == last
    assert [row["step"] for row in folder.rows("step")] == list(range(1, last + 1))
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["tiny", "tiny-2"]


@pytest.mark.parametrize(("processes", "platform", "is_used"), [(1, "cpu", True), (2, "cpu", False), (2, "gpu", True)])
def test_processes_on_cpus_read_no_compiled_programs(processes, platform, is_used, monkeypatch):
    """XLA stores programs for CPUs without the order of collectives inside of loops to those outside."""
    devices = [SimpleNamespace(platform=platform, process_index=i) for i in range(2)]
    before = jax.config.jax_enable_compilation_cache
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(mesh, "mesh_from", lambda devices, parallel: devices)
    try:
        jax.config.update("jax_enable_compilation_cache", True)
        assert mesh.make_mesh(ParallelConfig(1, 2)) == devices
        assert jax.config.jax_enable_compilation_cache == is_used
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
