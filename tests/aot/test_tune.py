"""The search for the fastest form, over programs whose costs are given."""

import dataclasses
import re
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from jax_moe_lb import Buffers, exact, plain, ultraep
from jax_moe_lb.aot import Target, print_tuned, tune
from jax_moe_lb.aot.compiler_options import LATENCY_HIDING
from jax_moe_lb.aot.layer import LayerProgram
from jax_moe_lb.transport import Direct, Gather, Once, PeerCopy, Relay, Saved
from tests.layer_cases import make_layer, make_mesh

TOKENS, WIDTH, INNER, EXPERTS = 64, 16, 8, 16
RANKS = 4
ROWS = 2 * TOKENS // RANKS
"""Copies of a rank; the receive buffer has 5 % more."""


@dataclass(frozen=True)
class Report:
    """Costs of a compiled form."""

    temp_bytes: int
    total_s: float
    exposed_s: float = 0.0

    def timeline(self, load):
        assert load.name == "zipf:1.0"
        return self


def costs(system, options):
    """Return seconds and bytes of a form: every option saves a tenth, and latency hiding takes 20 % more memory."""
    dispatch = system.dispatch
    step_s, temp_bytes = 1.0, 1_000_000
    if isinstance(dispatch, Once):
        return Report(900_000, 1.5)
    changes = dispatch.buffers.chunks - 1 + dispatch.saved.rows + dispatch.saved.replicas
    changes += system.replicate == PeerCopy()
    if options.get(LATENCY_HIDING):
        changes, temp_bytes = changes + 1, 1_200_000
    return Report(temp_bytes, step_s * 0.9**changes)


@pytest.fixture
def layer():
    return make_layer(make_mesh((RANKS,), ("expert",)), exact(2, dispatch="direct"), (WIDTH, EXPERTS, INNER))


@pytest.fixture(params=["h100:1x4", "v5e:2x2"])
def compiled(request, monkeypatch):
    """Compile for a target by `costs`; return the list of compiled forms."""
    forms = []

    def compile_form(self, system, options):
        forms.append((system, dict(options)))
        return costs(system, options)

    monkeypatch.setattr(LayerProgram, "compile", compile_form)
    monkeypatch.setattr(LayerProgram, "residual_bytes", lambda self, system: 0)
    monkeypatch.setattr(Target, "of", classmethod(lambda cls, devices: cls.parse(request.param)))
    return forms


X = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.float32)
RESIDUAL_BYTES = LayerProgram.residual_bytes
"""It traces every form, which takes seconds."""


@pytest.mark.slow
def test_every_change_that_saves_time_is_kept_within_the_memory(layer, compiled):
    tuned = tune(layer, X)
    saved = tuned.system.dispatch.saved
    assert isinstance(tuned.system.dispatch, Direct)
    assert (tuned.system.dispatch.buffers, saved.rows, saved.replicas) == (Buffers(chunks=2), True, True)
    assert LATENCY_HIDING not in tuned.best.compiler_options
    on_gpus = tuned.target.startswith("h100")
    assert tuned.system.replicate == (PeerCopy() if on_gpus else Gather())
    assert tuned.best.step_s == pytest.approx(0.9 ** (3 + on_gpus))
    assert tuned.memory_bytes == 1_050_000
    # One option at a time: not a product of all options.
    assert len(compiled) == len(tuned.tried) <= 12 + 2 * on_gpus


def test_more_memory_permits_latency_hiding(layer, compiled):
    tuned = tune(layer, X, memory_bytes=1_300_000)
    on_gpus = tuned.target.startswith("h100")
    assert tuned.best.compiler_options.get(LATENCY_HIDING, False) is on_gpus
    assert tuned.best.step_s == pytest.approx(0.9 ** (3 + 2 * on_gpus))
    # The mesh of this test is of CPUs, for which the library has no options.
    assert tuned.compiler_options == tuned.best.compiler_options


@pytest.mark.parametrize("system", [plain(dispatch="direct"), ultraep(dispatch="direct")])
def test_a_system_keeps_its_own_transport_of_weights(layer, compiled, system):
    layer.system = system
    assert {type(form.system.replicate) for form in tune(layer, X).tried} == {type(system.replicate)} <= {Gather, Relay}


@pytest.mark.slow
def test_saved_arrays_count_once_per_layer(layer, compiled, monkeypatch):
    """A stack that stores the arrays of every layer has no room for them; chunks are no residuals."""
    monkeypatch.setattr(LayerProgram, "residual_bytes", RESIDUAL_BYTES)
    tuned = tune(layer, X, layers=1000)
    assert tuned.system.dispatch == Direct(Buffers(chunks=2))
    of_form = {form.name.removeprefix("latency hiding, "): form.residual_bytes for form in tuned.tried}
    rows = layer.system.dispatch.buffers.rows(ROWS) * WIDTH * 4
    replicas = 2 * 3 * WIDTH * INNER * 4
    assert of_form["two chunks"] == pytest.approx(of_form["own form"], rel=0.01)
    assert of_form["two chunks, saved rows"] - of_form["two chunks"] == pytest.approx(rows, rel=0.1)
    assert of_form["two chunks, saved replicas"] - of_form["two chunks"] == replicas
    own = tuned.tried[0]
    assert own.memory_bytes == 1_000_000 + 999 * own.residual_bytes


def test_a_small_limit_takes_the_form_with_least_memory(layer, compiled):
    tuned = tune(layer, X, memory_bytes=950_000)
    assert isinstance(tuned.system.dispatch, Once)
    with pytest.raises(ValueError, match=r"memory_bytes is 800000; expected at least 900000, with Once"):
        tune(layer, X, memory_bytes=800_000)


def test_a_form_that_does_not_compile_is_named(layer, compiled, monkeypatch):
    def compile_form(self, system, options):
        if system.dispatch.buffers.chunks > 1:
            raise ValueError("the compiler rejects the program")
        return costs(system, options)

    monkeypatch.setattr(LayerProgram, "compile", compile_form)
    tuned = tune(layer, X)
    assert tuned.rejected == dict.fromkeys(["two chunks", "Once, two chunks"], "the compiler rejects the program")
    assert tuned.system.dispatch.buffers.chunks == 1


def test_one_round_needs_no_loop(layer, compiled):
    layer.system = replace(exact(4, dispatch="direct"), replica_slots=4)
    tuned = tune(layer, X)
    assert tuned.tried[1].name == "one round"
    assert tuned.tried[1].system.dispatch.buffers.max_rounds == 1
    layer.system = exact(2, dispatch="direct")
    assert all(form.system.dispatch.buffers.max_rounds is None for form in tune(layer, X).tried)


def test_the_printed_form_is_code(layer, compiled, capsys):
    tuned = tune(layer, X, memory_bytes=40 * 10**9)
    print_tuned(tuned, Console(width=200))
    printed = capsys.readouterr().out
    assert "estimated from the compiled programs, not run" in printed
    code = re.search(r"system = (dataclasses\.replace\(.*\))\n", printed)[1]
    classes = {kind.__name__: kind for kind in (Direct, Buffers, Saved, Gather, PeerCopy)}
    assert eval(code, classes | {"dataclasses": dataclasses, "system": layer.system}) == tuned.system
    assert all(form.reason for form in tuned.tried)


@pytest.mark.parametrize(("name", "value"), [("layers", 0), ("memory_bytes", 0), ("load", "zipf")])
def test_wrong_arguments_are_refused(layer, compiled, name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}; expected"):
        tune(layer, X, **{name: value})


def test_devices_without_rates_are_refused(layer):
    with pytest.raises(ValueError, match="devices are cpu; expected one of NVIDIA A100"):
        tune(layer, X)
