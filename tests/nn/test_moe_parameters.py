"""Parameters, state and arguments of `MoE` and its Linen form."""

import inspect

import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jax_moe_lb import Precision, as_linen
from tests.layer_cases import assert_close, make_mesh
from tests.nn.moe_cases import INNER, WIDTH, dense_layer, make, tokens


@pytest.mark.slow
def test_parameters_carry_logical_axes_and_are_placed():
    mesh = make_mesh((2, 2, 2), ("data", "node", "gpu"))
    layer = make(mesh, expert_axis=("node", "gpu"))
    assert layer.up[...].sharding.spec == PartitionSpec(("node", "gpu"), None, None)
    assert layer.up.get_metadata()["out_sharding"] == ("exp", "embed", "mlp")
    assert layer.down.get_metadata()["out_sharding"] == ("exp", "mlp", "embed")
    assert layer.kernel[...].sharding.is_fully_replicated


@pytest.mark.slow
def test_computing_in_bfloat16_keeps_float32_parameters():
    layer = make(make_mesh((8,), ("expert",)), precision=Precision(jnp.bfloat16))
    y, stats = nnx.jit(lambda layer, x: layer(x))(layer, tokens())
    assert y.dtype == jnp.bfloat16
    assert layer.up[...].dtype == jnp.float32
    assert_close(y, dense_layer(make(make_mesh((1,), ("expert",))), tokens()), 5e-2)
    # Replicas are sent in bfloat16.
    assert stats.weight_bytes_moved[0] % (3 * WIDTH * INNER * 2) == 0


@pytest.mark.slow
def test_a_bias_that_the_router_lacks_is_not_updated():
    layer = make(make_mesh((8,), ("expert",)))
    with pytest.raises(ValueError, match=r"router.selection_bias is False; expected True, for update_bias"):
        layer.update_bias(layer(tokens())[1])


def test_the_linen_form_says_what_it_takes():
    parameters = inspect.signature(as_linen).parameters
    assert {"system", "experts", "embed_dim"} < set(parameters)
    assert "rngs" not in parameters
