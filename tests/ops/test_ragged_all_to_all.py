import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from jax_moe_lb.ops.ragged_all_to_all import ragged_all_to_all
from tests.layer import make_mesh


def exchange(mesh, axes):
    spec = PartitionSpec(axes)

    def one_rank(*args):
        return ragged_all_to_all(*(arg[0] for arg in args), axis_name=axes)[None]

    return jax.jit(jax.shard_map(one_rank, mesh=mesh, in_specs=(spec,) * 6, out_specs=spec))


def draw_case(rng, num_ranks, per_peer, num_rows, skew):
    """Operands, and where slices go; sizes from empty to the whole operand."""
    slices = num_ranks * per_peer
    sizes = rng.poisson(num_rows / slices * rng.gamma(1 / skew, skew, (num_ranks, slices)))
    operand = rng.normal(size=(num_ranks, num_rows, 3)).astype(np.float32)
    sizes = np.minimum(sizes, num_rows // 2)
    starts = rng.integers(0, num_rows - sizes + 1)
    received = sizes.reshape(num_ranks, num_ranks, per_peer).transpose(1, 0, 2)
    landings = np.cumsum(received.reshape(num_ranks, -1), 1) - received.reshape(num_ranks, -1)
    landings = landings.reshape(num_ranks, num_ranks, per_peer)
    return operand, starts, sizes, landings.transpose(1, 0, 2).reshape(num_ranks, -1), received.reshape(num_ranks, -1)


def reference(operand, output, starts, sizes, landings):
    out = output.copy()
    num_ranks, slices = sizes.shape
    for source in range(num_ranks):
        for i in range(slices):
            to, size = i // (slices // num_ranks), sizes[source, i]
            rows = operand[source, starts[source, i] : starts[source, i] + size]
            out[to, landings[source, i] : landings[source, i] + size] = rows
    return out


MESHES = {
    ("expert",): make_mesh((8,), ("expert",)),
    ("node", "gpu"): make_mesh((2, 4), ("node", "gpu")),
}
RUN = {axes: exchange(mesh, axes) for axes, mesh in MESHES.items()}


@pytest.mark.parametrize("axes", MESHES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), per_peer=st.sampled_from([1, 3]), skew=st.sampled_from([0.1, 8.0]))
def test_exchange_against_a_loop(axes, seed, per_peer, skew):
    rng = np.random.default_rng(seed)
    operand, *where, received = draw_case(rng, 8, per_peer, 40, skew)
    output = rng.normal(size=(8, received.sum(1).max() // 64 * 64 + 128, 3)).astype(np.float32)
    got = RUN[axes](operand, output, *(jnp.asarray(a, jnp.int32) for a in (*where, received)))
    np.testing.assert_array_equal(got, reference(operand, output, *where))


def test_the_accelerators_path_lowers():
    """What runs where `lax.ragged_all_to_all` does can be lowered on a machine without such a device."""
    arrays = [jax.ShapeDtypeStruct((8, 16, 3), jnp.float32)] * 2 + [jax.ShapeDtypeStruct((8, 8), jnp.int32)] * 4
    text = RUN[("expert",)].trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "ragged_all_to_all" in text
    assert "while" not in text
