"""A layer is built and compiled as for accelerators, here for the devices present."""

import re

import jax
import pytest

from jax_moe_lb import exact, greedy, plain
from jax_moe_lb.aot import LayerSizes, Target, compile_layer, layer
from jax_moe_lb.layer.systems import system_named

SIZES = LayerSizes(hidden=64, inner=32, experts=16, tokens=32, per_token=2)
HERE = Target("cpu:1x8", "cpu", "cpu", (1, 1, 8))
TWO_NODES = Target("cpu:2x4", "cuda", "h100", (2, 1, 4))


class Lowered(Exception):
    """Text of a lowered layer."""


@pytest.fixture(autouse=True)
def devices(monkeypatch):
    monkeypatch.setattr(Target, "devices", lambda self: jax.devices()[:8])


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.thorough
def test_a_layer(gradients):
    report = compile_layer(greedy(), HERE, SIZES, gradients=gradients)
    experts, kernel, tokens = 3 * 2 * 64 * 32, 64 * 16, 32 * 64
    assert report.argument_bytes == 2 * (experts + kernel + tokens)
    assert report.ideal_flops == (3 if gradients else 1) * SIZES.ideal_flops
    # With gradients, these are outputs as well.
    assert report.output_bytes > 2 * ((experts + kernel) * gradients + tokens)
    assert {one.axes for one in report.collectives} == {("expert",)}
    assert report.compile_s > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "exact", "rails", "feplb"])
def test_no_constant_of_a_layer_is_empty(name, monkeypatch):
    # The compiler of JAX 0.11.2 crashes on them in `shard_map`: empty indices of a write to all slots, for example.
    def lowered(target, program, args, mesh, **_):
        raise Lowered(program.lower(*args).as_text())

    monkeypatch.setattr(layer, "compile_for", lowered)
    with pytest.raises(Lowered) as found:
        compile_layer(system_named(name), HERE, SIZES, gradients=True)
    operands = re.findall(r"sdy.manual_computation\(.*? manual_axes=\S+ \((.*)\) \{$", str(found.value), re.M)
    assert operands
    assert "tensor<0x" not in str(operands)


def test_a_rank_has_no_more_slots_than_experts(monkeypatch):
    def traced(*_, system, **__):
        raise Lowered(system.replica_slots)

    monkeypatch.setattr(layer, "_layer", traced)
    with pytest.raises(Lowered) as found:
        compile_layer(exact(99), HERE, SIZES)
    assert found.value.args == (14,)


@pytest.mark.slow
def test_a_program_that_calls_the_host_is_refused_for_a_device_that_is_absent(monkeypatch):
    def fail(self, **_):
        raise RuntimeError("Unknown backend: 'gpu' requested")

    monkeypatch.setattr(jax.stages.Traced, "lower", fail)
    with pytest.raises(ValueError, match=r"no form for cpu:1x8: it calls the host.*expected no HostCallback"):
        compile_layer(system_named("lplb"), HERE, SIZES)


def test_several_domains_are_nodes_of_the_mesh():
    assert dict(TWO_NODES.mesh().shape) == {"node": 2, "expert": 4}
    assert dict(HERE.mesh().shape) == {"expert": 8}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (LayerSizes(experts=12), "E is 12; expected a multiple of the target's 8 devices"),
        (LayerSizes(experts=8, per_token=9), "K is 9; expected at most E, 8"),
        (LayerSizes(tokens=2**31 - 1), "T is 2147483647; expected at most 2147483647 token copies of all ranks"),
        (LayerSizes(tokens=2**20, hidden=2**12), "at most 2147483647 elements of the tokens of a rank, not 4294967296"),
        (LayerSizes(experts=2**22), "E is 4194304; expected at most 16777216 counts of all ranks, not 33554432"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        compile_layer(plain(), HERE, sizes)
