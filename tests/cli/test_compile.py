"""`compile` reports unsupported input in one line; `ci/accelerators.sh` compiles supported cases."""

import importlib.util
import os
import signal
import subprocess
import sys

import jax
import pytest

from jax_moe_lb.aot import quiet_stderr
from jax_moe_lb.aot.targets import EXTRAS
from tests.cli.test_refusals import refusal

BAD = {
    "no target": (("--train",), "--target"),
    "unknown machine": (("--target", "x100:8"), "one of a100, h100, h200, b200, gb200, such as h100:1x8"),
    "a terminal's bell": (("--target", "\a"), "target is '\\x07'; expected"),
    "pages": (("--target", "x" * 10**6), "expected NAME:NODESxGPUS"),
}
BAD_OPTIONS = {
    "unknown system": (("--system", "nope"), "--system is 'nope'; expected one of eplb, "),
    "two systems": (("--system", "exact+ultraep"), "expected one of direct, once, forward, rails after +"),
    "sprayed waves": (("--system", "feplb+rails"), "dispatch is 'rails'; expected none for a system with TwoPhase"),
    "a size twice": (("--sizes", "H=64", "--sizes", "H=32"), "sizes is 'H=64,H=32'"),
    "no replicas": (("--system", "plain", "--replica-slots", "2"), "--replica-slots is 2;"),
    "headroom": (("--headroom", "nan"), "--headroom is 'nan'; expected a number above 0"),
    "rounds": (("--max-rounds", "0"), "--max-rounds is '0'; expected an integer, at least 1"),
    "a load": (("--timeline", "t", "--load", "zipf"), "--load is 'zipf'; expected uniform"),
    "no timeline": (("--against", "gone.json"), "--against is gone.json: No such file"),
    "no folder": (("--timeline", "gone/t.json"), "--timeline is gone/t.json; expected a file in"),
    "an array": (("--saved", "row"), "--saved is 'row'; expected one of replicas, rows, hidden"),
    "saved waves": (("--system", "feplb", "--saved", "rows"), "expected Saved() for TwoPhase"),
    "an option": (("--xla", "fast"), "--xla is 'fast'; expected NAME=VALUE"),
}
BAD |= {name: (("--target", "h100:1x8", *argv), expected) for name, (argv, expected) in BAD_OPTIONS.items()}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case, capsys):
    argv, expected = BAD[case]
    message = refusal(capsys, "compile", *argv)
    assert expected in message
    assert len(message) < 600


@pytest.mark.parametrize(("target", "extra"), [("h100:1x8", "cuda"), ("v5e:2x4", "tpu")])
def test_a_compiler_that_is_missing_is_named(target, extra, capsys, monkeypatch):
    found = importlib.util.find_spec
    modules = {module for modules in EXTRAS.values() for module in modules}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in modules else found(name))
    message = refusal(capsys, "compile", "--target", target)
    assert message == (
        f"error: target {target} requires the compiler of {extra}; run pip install '.[{extra}]' in a checkout\n"
    )


def test_what_compilers_log_stays_off_stderr(capfd):
    with quiet_stderr():
        os.write(2, b"W0000 a warning\n")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        pytest.param("SIGSEGV", "Segmentation fault", marks=pytest.mark.thorough),
        ("SIGABRT", "Aborted; F0000 a check fails"),
        ("SIGKILL", "no exit status"),
    ],
)
def test_a_compiler_that_ends_the_process_is_named(end, reason):
    code = (
        "import os, signal\n"
        "from jax_moe_lb.aot import quiet_stderr\n"
        "with quiet_stderr():\n"
        f"    os.write(2, b'W0000 a warning\\n' + b'F0000 a check fails\\n' * ({end!r} == 'SIGABRT'))\n"
        f"    os.kill(os.getpid(), signal.{end})\n"
    )
    # The pipe closes after the reporting process ends.
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.Signals[end]
    (line,) = [line for line in ended.stderr.splitlines() if "extension modules" not in line and line[:2] != "  "]
    assert line == f"error: the compiler of JAX {jax.__version__} ends this process: {reason}"


def test_after_a_crash_it_comes_out(capfd):
    def crash():
        os.write(2, b"F0000 the reason\n")
        raise RuntimeError("crashed")

    with pytest.raises(RuntimeError, match="crashed"), quiet_stderr():
        crash()
    assert "F0000 the reason" in capfd.readouterr().err
