"""`tune` prints the fastest form, here of programs with given costs."""

import json

import jax
import pytest

from jax_moe_lb.aot import Target
from jax_moe_lb.aot.layer import LayerProgram
from jax_moe_lb.cli import main
from tests.aot.test_tune import costs
from tests.cli.commands import refusal

SMALL = ("--target", "v5e:2x4", "--sizes", "H=16,F=8,E=16,T=8,K=2")


@pytest.fixture
def compiled(monkeypatch):
    """Compile on virtual devices by given costs."""
    monkeypatch.setattr(Target, "devices", lambda self: jax.devices()[:8])
    monkeypatch.setattr(Target, "require_compiler", lambda self: None)
    monkeypatch.setattr(Target, "of", classmethod(lambda cls, devices: cls.parse("v5e:2x4")))
    monkeypatch.setattr("jax_moe_lb.cli.compile.use_no_accelerators", lambda: None)
    monkeypatch.setattr(LayerProgram, "compile", lambda self, system, options: costs(system, options))
    monkeypatch.setattr(LayerProgram, "residual_bytes", lambda self, system: 0)


def test_the_fastest_form_as_json_and_text(compiled, capsys):
    assert main(["tune", *SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = "two chunks, saved replicas, saved rows"
    assert (found["best"], found["layers"], found["target"]) == (best, 1, "v5e:2x4")
    assert found["memory_bytes"] == 1_050_000
    assert [one["name"] for one in found["tried"]][:3] == ["own form", "one round", "two chunks"]
    assert main(["tune", *SMALL, "--memory", "0.9MB"]) == 0
    assert "fastest: Once" in capsys.readouterr().out
    assert "--memory is 1000; expected at least " in refusal(capsys, "tune", *SMALL, "--memory", "1kB")


BAD = [
    (("--memory", "2"), "--memory is '2'; expected a size above 0 with its unit"),
    (("--layers", "0"), "--layers is '0'; expected an integer, at least 1"),
    (("--sizes", "E=12"), "E is 12; expected a multiple of the target's 8 devices"),
    (("--target", "v4:2x2x1"), "device is 'v4'; expected one with rates"),
]


@pytest.mark.parametrize(("argv", "expected"), BAD, ids=[expected for _, expected in BAD])
def test_bad_input_is_refused(argv, expected, capsys):
    target = () if "--target" in argv else ("--target", "v5e:2x4")
    assert expected in refusal(capsys, "tune", *target, *argv)
