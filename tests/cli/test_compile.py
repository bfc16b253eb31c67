"""`compile` reports unsupported input in one line; `ci/accelerators.sh` compiles supported cases."""

import importlib.util
import os
import subprocess
import sys

import jax
import pytest

from jax_moe_lb.aot import quiet_stderr
from jax_moe_lb.aot.targets import EXTRAS
from tests.cli.commands import refusal

BAD = [
    (("--train",), "--target"),
    (("--target", "x" * 10**6), "--target is 'xxx"),
    (("--target", "h100"), "expected NAME:NODESxGPUS"),
]
BAD_OPTIONS = [
    (("--system", "nope"), "--system is 'nope'; expected one of eplb, "),
    (("--system", "exact+ultraep"), "expected one of direct, once, forward, rails after +"),
    (("--system", "feplb+rails"), "dispatch is 'rails'; expected none for a system with TwoPhase"),
    (("--sizes", "H=64", "--sizes", "H=32"), "--sizes is 'H=64,H=32'"),
    (("--system", "plain", "--replica-slots", "2"), "--replica-slots is 2;"),
    (("--replica-slots", "-1"), "--replica-slots is '-1'; expected an integer, at least 0"),
    (("--replica-slots", "0", "--timeline", "t", "--load", "no.npy"), "--load is no.npy: No such file"),
    (("--headroom", "nan"), "--headroom is 'nan'; expected a number above 0"),
    (("--max-rounds", "0"), "--max-rounds is '0'; expected an integer, at least 1"),
    (("--timeline", "t", "--load", "none.npy"), "--load is none.npy: No such file"),
    (("--load", "uniform"), "--load is 'uniform'; expected zipf:1.0 without --timeline"),
    (("--timeline", "gone/t.json"), "--timeline is gone/t.json: No such file or directory; expected a writable file"),
    (("--timeline", "."), "--timeline is .: Is a directory; expected a writable file"),
    (("--saved", "row"), "--saved is 'row'; expected one of replicas, rows, hidden"),
    (("--system", "feplb", "--saved", "rows"), "expected Saved() for TwoPhase"),
    (("--xla", "fast"), "--xla is 'fast'; expected NAME=VALUE"),
    (("--xla", "a=1", "--xla", "--a=2"), "--xla is 'a=1, --a=2'; expected every option once"),
]
BAD += [(("--target", "h100:1x8", *argv), expected) for argv, expected in BAD_OPTIONS]


@pytest.mark.parametrize(("argv", "expected"), BAD, ids=[expected for _, expected in BAD])
def test_bad_input_is_refused(argv, expected, capsys):
    message = refusal(capsys, "compile", *argv)
    assert expected in message
    assert len(message) < 600


@pytest.mark.parametrize(("target", "extra"), [("h100:1x8", "cuda"), ("v5e:2x4", "tpu")])
def test_a_compiler_that_is_missing_is_named(target, extra, capsys, monkeypatch):
    found = importlib.util.find_spec
    modules = {module for modules in EXTRAS.values() for module in modules}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in modules else found(name))
    remedy = f"run pip install '.[{extra}]' in a checkout"
    message = refusal(capsys, "compile", "--target", target)
    assert message == f"error: target {target} requires the compiler of {extra}; {remedy}\n"


def test_what_compilers_log_stays_off_stderr(capfd):
    with quiet_stderr():
        os.write(2, b"W0000 a warning\n")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"


ENDS = {"SIGSEGV": "Segmentation fault", "SIGABRT": "Aborted; F0000 a check fails", "SIGKILL": "no exit status"}


@pytest.mark.slow
def test_a_compiler_that_ends_the_process_is_named():
    # Each signal ends a child of one process, as an import takes seconds.
    code = """
import os, signal, sys
from jax_moe_lb.aot import quiet_stderr
for end in sys.argv[1:]:
    if os.fork() == 0:
        with quiet_stderr():
            os.write(2, b"W0000 a warning\\n" + b"F0000 a check fails\\n" * (end == "SIGABRT"))
            os.kill(os.getpid(), getattr(signal, end))
    print(signal.Signals(os.wait()[1] & 127).name)
"""
    # The pipe closes after the reporting processes end.
    command = [sys.executable, "-W", "ignore", "-c", code, *ENDS]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == list(ENDS)
    said = [line for line in ended.stderr.splitlines() if "extension modules" not in line and line[:2] != "  "]
    begin = f"error: the compiler of JAX {jax.__version__} ends this process: "
    assert sorted(said) == sorted(begin + reason for reason in ENDS.values())


def test_an_interrupt_from_the_terminal_does_not_reach_the_reporter(monkeypatch):
    started, begin = [], subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **options: started.append(begin(*args, **options)) or started[0]
    )
    with quiet_stderr():
        assert os.getpgid(started[0].pid) == started[0].pid


def test_an_interrupt_does_not_print_the_log(capfd):
    def interrupted():
        os.write(2, b"W0000 a warning\n")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), quiet_stderr():
        interrupted()
    assert capfd.readouterr().err == ""


def test_after_a_crash_it_comes_out(capfd):
    def crash():
        os.write(2, b"F0000 the reason\n")
        raise RuntimeError("crashed")

    with pytest.raises(RuntimeError, match="crashed"), quiet_stderr():
        crash()
    assert "F0000 the reason" in capfd.readouterr().err
