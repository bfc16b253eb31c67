"""One slice per rank against one slice per slot, in whole layers."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from benchmarks.layer.workloads import WORKLOADS
from jax_moe_lb import Buffers, System, Topology, exact, plain
from jax_moe_lb.balancers import UltraEP
from jax_moe_lb.transport import Direct, QuantizedTransfer, Saved
from tests.layer_cases import Case, assert_equals_dense, make_mesh, sharded_moe, with_gradients
from tests.marks import parametrize

pytestmark = pytest.mark.slow

MESH = make_mesh((8,), ("expert",))
BY_SLOT = Topology.from_mesh(MESH, ranks_per_domain=4)
# As on GPUs with a process each. The rows travel by the custom call of one process all the same.
BY_RANK = replace(BY_SLOT, platform="cuda", ranks_per_process=1)


def test_gpus_of_several_processes_send_one_slice_per_rank():
    assert Direct().sends_one_slice_per_rank(BY_RANK)
    assert not Direct().sends_one_slice_per_rank(BY_SLOT)
    assert not Direct().sends_one_slice_per_rank(replace(BY_RANK, ranks_per_process=8))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("system", "dtype"),
    [
        (exact(), "float32"),
        (exact().replace(transfer=QuantizedTransfer(block=4)), "float32"),
        (plain(), "bfloat16"),
        # Without relays, which need one process.
        (System(UltraEP(), replica_slots=2), "bfloat16"),
        (exact(), "bfloat16"),
    ],
    ids=["exact", "quantized", "plain", "ultraep", "exact in bfloat16"],
)
def test_one_round_has_the_same_bits(system, dtype):
    system = system.replace(buffers=Buffers(8.0))
    layers = [with_gradients(sharded_moe(MESH, topology, system)) for topology in (BY_SLOT, BY_RANK)]
    for workload in WORKLOADS:
        args = Case().arguments(workload, 8, dtype, dtype)
        by_slot, by_rank = (layer(*args) for layer in layers)
        jax.tree.map(np.testing.assert_array_equal, by_rank, by_slot)


@parametrize("headroom, chunks", [(0.4, 3)], [(1.5, 2)])
def test_rows_saved_in_chunks_have_the_order_of_the_backward_pass(headroom, chunks, x64):
    system = exact(1, Buffers(headroom, chunks=chunks), dispatch="direct").replace(saved=Saved(rows=True, hidden=True))
    layer = with_gradients(sharded_moe(MESH, BY_RANK, system))
    assert_equals_dense(layer, Case().arguments("balanced", 8, "float64", "float64"), 1e-12)
