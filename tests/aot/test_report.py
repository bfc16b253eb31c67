"""A report contains the compiler's numbers and the values derived from them."""

import errno
import importlib
import io
import json
import os
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from jax_moe_lb.aot import LayerSizes, Target, print_report, write_timeline
from jax_moe_lb.aot.compile import read_report
from jax_moe_lb.cli import main
from tests.aot.programs import SIZES
from tests.layer_cases import make_mesh


@pytest.fixture(scope="module")
def report(exchanging):
    target = Target.parse("h100:1x8")
    mesh = make_mesh(tuple(SIZES.values()), tuple(SIZES))
    return read_report(target, exchanging.compiled, mesh, exchanging.folder, 2 * 16**3, 1.5)


def test_json_has_what_is_promised(report):
    found = json.loads(json.dumps(report.to_json()))
    assert found.keys() >= {"temp_bytes", "hbm_bytes", "custom_calls"}
    assert found["flops_over_ideal"] == 11
    assert found["argument_bytes"] == 16 * 16 * 4
    assert found["fits"] is True
    # A CPU program has no GPU thunks.
    assert found["host_waits"] is None
    assert {one["kind"] for one in found["collectives"]} >= {"all-gather", "all-to-all"}


@pytest.fixture
def command(report, monkeypatch):
    """Let `compile` report this program."""
    command = importlib.import_module("jax_moe_lb.cli.compile")
    monkeypatch.setattr(command, "compile_layer", lambda *_, **__: report)
    monkeypatch.setattr(command, "use_no_accelerators", lambda: None)
    monkeypatch.setattr(Target, "require_compiler", lambda self: None)
    return command


def test_a_full_disk_is_one_line(command, capsys, monkeypatch):
    argv = ["compile", "--target", "h100:1x8", "--logs"]
    assert main([*argv, "--timeline", "/dev/full"]) == 2
    message = "--timeline is /dev/full: No space left on device; expected a writable file"
    assert capsys.readouterr() == ("", f"error: {message}\n")

    def print_on_full_disk(report, title):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(command, "print_report", print_on_full_disk)
    with open(os.devnull, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(argv) == 1
    assert "standard output cannot be written: No space left on device" in capsys.readouterr().err


def test_json_of_the_command_has_both_timelines(report, command, tmp_path, capsys):
    other = tmp_path / "other.json"
    write_timeline(other, report.timeline(), "another")
    assert main(["compile", "--target", "h100:1x8", "--against", str(other), "--logs", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["against"]["title"], found["timeline"]["title"] == found["title"]) == ("another", True)
    assert found["against"]["total_s"] == report.timeline().total_s


def test_memory_is_compared_with_all_that_a_program_takes(report):
    full = replace(report, memory_bytes=report.total_bytes)
    assert full.fits
    assert not replace(full, argument_bytes=full.argument_bytes + 1).fits
    unknown = replace(full, memory_bytes=None, ideal_flops=None)
    assert (unknown.fits, unknown.flops_over_ideal) == (None, None)


def test_tables_tell_the_same(report):
    console = Console(width=200, file=io.StringIO())
    print_report(replace(report, custom_calls={"a": 2}, host_waits=3), "a title", console)
    text = console.file.getvalue()
    parts = ("a title", "11.000 of the ideal", "yes: ", "host waits", "a x 2", "all-gather", "node, expert", "not run")
    assert not [part for part in parts if part not in text]


def test_the_ideal_of_a_layer():
    sizes = LayerSizes(hidden=16, inner=8, experts=4, tokens=32, per_token=2)
    router, copies = 32 * 16 * 4, 32 * 2 * 3 * 16 * 8
    assert sizes.ideal_flops == 2 * (router + copies)


@pytest.mark.parametrize(
    "text", ["H", "H=", "H=0", "H=1.5", "H=-1", "Z=1", "H=1,H=2", "H=1;F=2", "H=99999999999", "h=1", "", "H=\u0661"]
)
def test_bad_sizes_are_refused(text):
    with pytest.raises(ValueError, match=r"^sizes is .*; expected some of H, F, E, T and K, such as H=2048,"):
        LayerSizes.parse(text)


def test_sizes_that_are_not_given_stay():
    assert LayerSizes.parse("H=64, T=32") == replace(LayerSizes(), hidden=64, tokens=32)
