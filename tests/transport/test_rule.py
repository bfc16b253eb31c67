"""The rule that chooses a dispatch, and layers that apply it."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType

from jax_moe_lb import Buffers, ExpertConfig, MoE, System, TopK, Topology, exact, rails
from jax_moe_lb.core import Level
from jax_moe_lb.kernels import tpu_rows
from jax_moe_lb.transport import (
    AutoDispatch,
    Direct,
    Forward,
    Once,
    QuantizedTransfer,
    Saved,
    TwoPhase,
    dispatch_by_rule,
)

NODES = Topology((Level("node", 4), Level("gpu", 8)), ranks_per_domain=8)
SLICES = replace(NODES, platform="tpu", device_kind="TPU v5e", expert_axes=("slice", "chip"), slice_axes=("slice",))


@pytest.mark.parametrize(
    ("topology", "experts", "per_token", "kind"),
    [
        (NODES, 256, 8, Forward),
        (NODES, 256, None, Forward),
        (replace(NODES, ranks_per_domain=4), 256, 8, Forward),
        # Replicas would leave their node.
        (replace(NODES, ranks_per_domain=32), 256, 8, Direct),
        (replace(NODES, ranks_per_domain=32), 256, 64, Once),
        # Nodes of one rank each are one level.
        (Topology((Level("node", 8), Level("gpu", 1)), ranks_per_domain=1), 256, 2, Direct),
        (Topology((Level("node", 8), Level("gpu", 1)), ranks_per_domain=1), 256, 8, Once),
        (Topology((Level("node", 1), Level("gpu", 4)), ranks_per_domain=4), 256, 8, Once),
        # 3.6 of 8 rows, 5.3 of 8, 3.3 of 4, and 7.3 of 8.
        (Topology.flat(4), 256, 8, Once),
        (Topology.flat(8), 256, 8, Direct),
        (Topology.flat(8), 256, 4, Direct),
        (Topology.flat(32), 256, 8, Direct),
        (Topology.flat(8), 256, None, Direct),
        (Topology.flat(1), 256, 8, Direct),
        (replace(NODES, platform="tpu"), 256, 8, Direct),
        (replace(NODES, platform="tpu", device_kind="TPU v5e"), 256, 8, AutoDispatch),
        (replace(NODES, platform="cuda"), 256, 8, Forward),
        (SLICES, 256, 8, Forward),
        # Ranks of equal offset, in expert domains over all slices.
        (replace(SLICES, levels=(Level("node", 1), Level("gpu", 8))), 256, 8, AutoDispatch),
        # Nodes are lines of chips of two slices.
        (replace(SLICES, slice_axes=("chip",)), 256, 8, AutoDispatch),
    ],
)
def test_nodes_and_expected_rows_decide(topology, experts, per_token, kind):
    found = dispatch_by_rule(topology, experts, per_token)
    assert type(found.dispatch) is kind
    assert found.reason.startswith(f"{kind.__name__}: ")


TPU = replace(Topology.flat(8), platform="tpu", device_kind="TPU v5 lite")


@pytest.mark.parametrize(
    ("topology", "shape", "dtype", "reason", "chunks"),
    [
        (TPU, (4096, 2048), "bfloat16", "Once: 5.3 of 8 rows", 2),
        (TPU, (1024, 2048), "bfloat16", "Once: 5.3 of 8 rows", 2),
        (TPU, (1023, 2048), "bfloat16", "Once: 5.3 of 8 rows", 1),
        (TPU, (4096, 2048), "float32", "Direct: no kernel copies rows, rows are float32; expected bfloat16", 2),
        (TPU, (4096, 2304), "bfloat16", "Direct: no kernel copies rows, width is 2304", 2),
        # A chunk has the row and the weight of each copy, a round the rows: 551 KB, and 1,101 KB.
        (TPU, (16384, 2048), "bfloat16", "Once: 5.3 of 8 rows", 2),
        (TPU, (32768, 2048), "bfloat16", "Direct: no kernel copies rows, lists have", 2),
        (
            replace(NODES, platform="tpu", device_kind="TPU v5e"),
            (4096, 2048),
            "bfloat16",
            "Direct: Once would send 7.3",
            2,
        ),
        (replace(TPU, device_kind="TPU v5"), (4096, 2048), "bfloat16", "Direct: a TPU other than v5e and v6e", 2),
        (replace(TPU, device_kind="TPU v6 lite"), (4096, 2048), "bfloat16", "Once: 5.3 of 8 rows", 2),
        (replace(TPU, device_kind="TPU v6 lite"), (1024, 2048), "float32", "Direct: no kernel copies rows", 2),
        (replace(TPU, device_kind="TPU7x"), (4096, 2048), "bfloat16", "Direct: a TPU other than v5e and v6e", 1),
        (Topology.flat(4), (4096, 2048), "float32", "Once: 3.6 of 8 rows", 1),
    ],
)
def test_tokens_decide_on_tpus_alone(topology, shape, dtype, reason, chunks, monkeypatch):
    monkeypatch.setattr(tpu_rows, "OLDEST_JAX", (0,))
    found = dispatch_by_rule(topology, 256, 8, AutoDispatch(), jax.ShapeDtypeStruct(shape, dtype))
    assert found.reason.startswith(reason)
    assert found.reason.startswith(type(found.dispatch).__name__)
    assert found.dispatch.buffers == Buffers(chunks=chunks)


@pytest.mark.parametrize("given", [Once(), TwoPhase(), rails().dispatch, Direct(), Direct(Buffers(chunks=2))])
def test_requested_dispatches_and_options_stay(given):
    assert dispatch_by_rule(NODES, 256, 8, given).dispatch == given


def test_chunks_choose_direct():
    assert dispatch_by_rule(NODES, 256, 8, AutoDispatch(Buffers(chunks=2))).dispatch == Direct(Buffers(chunks=2))


def test_options_carry_over():
    given = AutoDispatch(Buffers(1.3, max_rounds=1), QuantizedTransfer(block=32), Saved(replicas=True))
    found = dispatch_by_rule(NODES, 256, 8, given).dispatch
    assert found == Forward(given.buffers, given.transfer, given.saved)


@pytest.mark.slow
def test_a_layer_follows_the_rule_unless_its_dispatch_is_given():
    mesh = jax.make_mesh((2, 2), ("node", "gpu"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    topology = Topology.from_mesh(mesh, ("node", "gpu"))

    def dispatch(system, topology, per_token=2):
        experts = ExpertConfig(8)
        layer = MoE(
            8, 8, TopK(per_token), mesh=mesh, topology=topology, system=system, experts=experts, rngs=nnx.Rngs(0)
        )
        return layer.system.dispatch

    assert dispatch("exact", topology) == Forward()
    assert dispatch(exact(2), topology) == Forward()
    assert dispatch(System(), topology) == Forward()
    assert dispatch(exact(2, dispatch="direct"), topology) == Direct()
    assert dispatch(System(dispatch=Direct()), topology) == Direct()
    one_axis = Topology.from_mesh(mesh, "gpu", data_axes="node")
    assert dispatch("plain", one_axis) == Direct()
    assert dispatch("plain", one_axis, per_token=4) == Once()
    assert dispatch("feplb", topology) == TwoPhase(Buffers(headroom=2.0))


@pytest.mark.slow
@pytest.mark.parametrize("system", ["exact", exact()], ids=["text", "function"])
def test_a_plain_function_as_router_has_the_dispatch_of_its_routing(system):
    """`test_system_text.py` compares text and function with other routers."""

    def router(logits, bias, info):
        return TopK(4)(logits, bias, info)

    mesh = jax.make_mesh((2,), ("gpu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    options = {"mesh": mesh, "topology": Topology.from_mesh(mesh, "gpu"), "experts": ExpertConfig(8)}
    layers = (MoE(8, 8, router, system=one, rngs=nnx.Rngs(0), **options) for one in (system, exact(dispatch="once")))
    program, once = (str(jax.make_jaxpr(lambda x, layer=layer: layer(x)[0])(jnp.ones((8, 8)))) for layer in layers)
    assert re.sub("0x[0-9a-f]+", "", program) == re.sub("0x[0-9a-f]+", "", once)
