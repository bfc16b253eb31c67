"""Plain Orbax calls save a layer on 8 ranks and restore it on 4; examples/checkpoints.py covers other rank counts."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from jax_moe_lb import ExpertConfig, MoE, SharedExpert, TopK, Topology, plain
from jax_moe_lb.layer.systems import system_names
from jax_moe_lb.nn import SharedMix, mesh_independent_state, restore_mesh_independent_state
from jax_moe_lb.transport import Codec, CodecBase, ExpertDomains, GatherExpertDomain, hybrid_mesh
from tests.layer_cases import make_mesh

OPTIONS = {
    "biases": {"experts": ExpertConfig(12, use_bias=True), "router": TopK(2, selection_bias=True, logit_bias=True)},
    "shared": {"shared": SharedExpert(8, SharedMix.SIGMOID)},
    "homes": {"system": plain().replace(relocates=True)},
    "no gate": {"experts": ExpertConfig(12, gated=False)},
}
EVERYDAY = {"eplb", "homes"}
"""Cases tested by default: systems with state, and parameters with their own axes."""

CASES = {name: {"system": name} for name in system_names()} | OPTIONS


def make(num_ranks, router=TopK(2), **options):
    options = {"system": plain(), "experts": ExpertConfig(12)} | options
    return MoE(8, 16, router, mesh=make_mesh((num_ranks,), ("expert",)), rngs=nnx.Rngs(num_ranks), **options)


def migrating(num_ranks):
    devices = make_mesh((num_ranks,), ("gpu",))
    mesh = hybrid_mesh(devices, {"gpu": 2})
    domains = ExpertDomains.from_mesh(mesh, Topology.from_mesh(devices, "gpu"))
    migrate = GatherExpertDomain(domains, Codec(2.0, CodecBase.REMEMBERED))
    return MoE(
        8,
        16,
        TopK(2),
        mesh=mesh,
        system=plain().replace(migrate=migrate),
        experts=ExpertConfig(12),
        rngs=nnx.Rngs(num_ranks),
    )


def carry_over(layer, other, folder):
    saved, target = mesh_independent_state(layer), mesh_independent_state(other)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), target)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoint", saved)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(folder / "checkpoint", shapes)
    restore_mesh_independent_state(other, restored)
    for (path, got), want in zip(
        jax.tree.leaves_with_path(mesh_independent_state(other)), jax.tree.leaves(saved), strict=True
    ):
        np.testing.assert_array_equal(got, want, err_msg=jax.tree_util.keystr(path))
        assert len(got.sharding.device_set) == other.mesh.size, jax.tree_util.keystr(path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the system cannot balance")
@pytest.mark.parametrize(
    "case", [case if case in EVERYDAY else pytest.param(case, marks=pytest.mark.thorough) for case in CASES]
)
def test_a_layer_is_restored_on_other_ranks(case, tmp_path):
    layer, other = make(8, **CASES[case]), make(4, **CASES[case])
    if jax.tree.leaves(other.state):
        with pytest.warns(UserWarning, match="balancers that remember loads begin without any"):
            carry_over(layer, other, tmp_path)
        assert jax.tree.leaves(other.state)[0].shape[0] == 1
    else:
        carry_over(layer, other, tmp_path)


@pytest.mark.slow
def test_what_expert_domains_know_is_told_anew(tmp_path):
    layer, other = migrating(8), migrating(4)
    carry_over(layer, other, tmp_path)
    known = np.asarray(other.known[0][...])
    assert known.shape[0] == 32
    # Ranks of a domain of two hold the same experts.
    np.testing.assert_array_equal(known[:8], known[8:16])
    assert np.isin(np.asarray(layer.up[...])[0], known).all()
