import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_moe_lb.core.manual_axes import unvarying_call, varying_axes
from tests.layer_cases import make_mesh


def test_a_function_sees_no_mesh_axes_and_its_result_has_them():
    seen = []

    def product(rows, others):
        seen.append((varying_axes(rows), varying_axes(others)))
        return jnp.maximum(rows @ others, jnp.arange(5.0)[None])

    def one_rank(rows, others):
        out = unvarying_call(product, rows, others)
        assert varying_axes(out) == {"expert"}
        return out

    rows, others = jnp.arange(24.0).reshape(8, 3) - 12, jnp.ones((12, 5))
    spec = PartitionSpec("expert")
    run = jax.shard_map(one_rank, mesh=make_mesh((4,), ("expert",)), in_specs=(spec, spec), out_specs=spec)
    np.testing.assert_allclose(jax.jit(run)(rows, others), np.maximum(rows @ others[:3], np.arange(5.0)))
    assert seen == [(frozenset(), frozenset())]
    np.testing.assert_allclose(unvarying_call(product, rows, others[:3]), product(rows, others[:3]))
