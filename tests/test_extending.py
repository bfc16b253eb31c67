"""The replication of docs/extending.md serves like those of the library."""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks.layer.workloads import WORKLOADS
from jax_moe_lb import Buffers, System, Topology
from jax_moe_lb.balancers import Greedy
from jax_moe_lb.transport import Direct, Gather, TwoPhase
from tests.layer_cases import Case, assert_equals_dense, make_mesh, sharded_moe, with_gradients
from tests.page_blocks import blocks

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
CASE = Case()


@functools.cache
def all_gather():
    """Return the replication of the page."""
    (block,) = (block for block in blocks(PAGE) if "class AllGather" in block.code)
    names = {}
    exec(block.code, names)
    return names["AllGather"]()


@pytest.mark.parametrize("dispatch", [Direct(Buffers(0.6)), TwoPhase(Buffers(0.6))], ids=["one wave", "two phases"])
@pytest.mark.thorough
def test_a_replication_from_outside_serves_in_every_wave(dispatch):
    """Values, and gradients by its `add_at_home`, equal a dense layer."""
    system = System(Greedy(), all_gather(), dispatch, replica_slots=2)
    mesh = make_mesh((8,), ("expert",))
    layer = with_gradients(sharded_moe(mesh, Topology.from_mesh(mesh, ranks_per_domain=4), system))
    for workload in WORKLOADS:
        assert_equals_dense(layer, CASE.arguments(workload, 8), 1e-5)
    assert layer._cache_size() == 1


@pytest.mark.slow
def test_it_fills_slots_like_gather():
    mesh = make_mesh((8,), ("expert",))
    both = (System(Greedy(), replicate, replica_slots=2) for replicate in (Gather(), all_gather()))
    layers = (jax.jit(sharded_moe(mesh, Topology.from_mesh(mesh), system)) for system in both)
    outs = [layer(*CASE.arguments(WORKLOADS[1], 8)[:4]) for layer in layers]
    assert float(outs[0][1].weight_bytes_moved[0]) > 0
    jax.tree.map(np.testing.assert_array_equal, *outs)
