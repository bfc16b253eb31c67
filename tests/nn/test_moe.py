import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_moe_lb import TopK, Topology
from jax_moe_lb.layer.systems import eplb
from jax_moe_lb.nn.variables import BalancerState
from tests.layer_cases import assert_close, make_mesh
from tests.nn.moe_cases import WIDTH, dense_layer, make, tokens


@pytest.mark.thorough
def test_a_decode_step_needs_no_buffers_of_training():
    layer = make(make_mesh((8,), ("expert",)))
    temporaries = []
    for num_tokens in (8, 64 * 1024):
        x = jax.ShapeDtypeStruct((num_tokens, WIDTH), jnp.float32)
        step = jax.jit(lambda x: layer(x)[0]).lower(x).compile()
        temporaries.append(step.memory_analysis().temp_size_in_bytes)
    assert temporaries[0] < temporaries[1] / 100


@pytest.mark.thorough
@pytest.mark.parametrize("num_tokens", [3, 25])
def test_embedding_gradients_of_any_number_of_tokens(num_tokens):
    mesh = make_mesh((4, 2), ("expert", "tensor"))
    topology = Topology.from_mesh(mesh, tensor_axes=("tensor",))
    layer = make(mesh, "exact", topology=topology)
    ids, embedding = jnp.arange(63, 63 - num_tokens, -1), jax.random.normal(jax.random.key(1), (64, WIDTH))

    def loss(embedding, layer, call):
        x = embedding[ids]
        # A row of zeros becomes NaN.
        x = x / jnp.abs(x).sum(-1, keepdims=True)
        return jnp.square(x + 1 + call(layer, x)).mean()

    gradient = nnx.jit(nnx.grad(loss), static_argnums=2)
    outputs = gradient(embedding, layer, lambda layer, x: layer(x)[0])
    assert_close(outputs, gradient(embedding, layer, dense_layer), 1e-5)


@pytest.mark.thorough
def test_tokens_on_no_mesh_go_through_a_layer_on_an_explicit_one():
    """Inputs without a mesh give outputs replicated over it."""
    outs = [make(make_mesh((8,), ("expert",), kind))(tokens())[0] for kind in (AxisType.Auto, AxisType.Explicit)]
    assert outs[1].sharding.is_fully_replicated
    np.testing.assert_allclose(*outs, rtol=1e-6)


@pytest.mark.thorough
def test_explicit_axes_may_both_split_the_sequence_in_a_scan_with_remat():
    """Two layers with a state carried between steps, against the same layers on Auto axes."""
    x, names = tokens(), ("data", "expert")

    def run(axis_type, spec):
        mesh = make_mesh((2, 2), names, axis_type)
        layers = [make(mesh, eplb(1), router=TopK(2)) for _ in range(2)]
        graph = nnx.split(layers[0])[0]
        stack = jax.tree.map(lambda *parts: jnp.stack(parts), *(nnx.split(layer)[1] for layer in layers))

        @jax.checkpoint
        def body(x, state):
            layer = nnx.merge(graph, state)
            y, stats = layer(x)
            # The sharding assigns other tokens to the ranks and groups, which sums over them do not show.
            return x + y, (nnx.state(layer, BalancerState), stats.counts.sum((0, 1)))

        def loss(x):
            y, (_, counts) = jax.lax.scan(body, x, stack)
            return jnp.square(y).mean(), counts

        placed = x if spec is None else jax.device_put(x, NamedSharding(mesh, spec))
        return jax.jit(jax.value_and_grad(loss, has_aux=True))(placed)

    explicit = run(AxisType.Explicit, PartitionSpec(None, names))
    auto = run(AxisType.Auto, PartitionSpec(names))
    assert_close(jax.tree.leaves(explicit), jax.tree.leaves(auto), 1e-5)


def test_tokens_of_numpy_have_the_dtype_that_jax_gives_them(unchecked):
    layer = make(make_mesh((2,), ("expert",)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y, _ = jax.eval_shape(lambda: layer(np.ones((4, WIDTH))))
    assert y.dtype == jnp.float32
