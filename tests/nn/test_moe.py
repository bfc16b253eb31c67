import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_moe_lb import Experts, TopK, Topology, plain
from jax_moe_lb.layer import CHECKPOINT_NAMES
from jax_moe_lb.layer.systems import eplb
from jax_moe_lb.nn.variables import BalancerState
from tests.layer_cases import assert_close, make_layer, make_mesh
from tests.nn.moe_cases import INNER, NUM_EXPERTS, WIDTH, dense_layer, make, tokens
from tests.oracle import dense_moe


@pytest.mark.slow
@pytest.mark.thorough
def test_it_works_where_some_axes_are_manual_already():
    """Two pipeline stages with separate microbatches."""
    mesh = make_mesh((2, 2, 2), ("stage", "data", "expert"))
    topology = Topology.from_mesh(mesh, data_axes="data")
    layer = make(mesh, "exact", topology=topology)
    reference = make(make_mesh((1,), ("expert",)))
    graph, state = nnx.split(layer)
    x = jnp.stack([tokens(), 2 * tokens()])

    def stages(state):
        def one(state, x):
            return nnx.merge(graph, state)(x[0])[0][None]

        spec = PartitionSpec("stage")
        # With check_vma, JAX 0.12 cannot lower the gradient of nested `shard_map`s.
        options = {"axis_names": {"stage"}, "check_vma": False}
        y = jax.shard_map(one, mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=spec, **options)(state, x)
        return jnp.square(y).mean(), y

    (_, y), got = jax.jit(jax.value_and_grad(stages, has_aux=True))(state)
    for i in range(2):
        assert_close(y[i], dense_layer(reference, x[i]), 1e-5)
    of_dense = nnx.jit(nnx.grad(lambda layer, x: jnp.square(dense_layer(layer, x)).mean()))
    want = of_dense(reference, x.reshape(-1, *x.shape[2:]))
    assert_close(nnx.to_pure_dict(got), nnx.to_pure_dict(want), 1e-5)
    graph, state = nnx.split(make_layer(mesh, plain(), (WIDTH, NUM_EXPERTS, INNER)))
    with pytest.raises(ValueError, match=r"topology has the axes \['stage'\], which are manual already"):
        jax.eval_shape(stages, state)


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
@pytest.mark.slow
def test_scan_over_stacked_layers_with_remat():
    mesh = make_mesh((8,), ("expert",))
    num_layers = 3

    @nnx.split_rngs(splits=num_layers)
    @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
    def stack(rngs):
        return make(mesh, rngs=rngs)

    layers = stack(nnx.Rngs(0))
    policy = jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)

    @nnx.remat(policy=policy)
    def block(layer, x):
        y, stats = layer(x)
        return x + y, stats

    @nnx.jit
    def run(layers, x):
        def loss(layers):
            out, stats = nnx.scan(lambda x, layer: block(layer, x), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(
                x, layers
            )
            return jnp.square(out).mean(), stats

        return nnx.value_and_grad(loss, has_aux=True)(layers)

    (value, stats), gradient = run(layers, tokens())

    def reference(params):
        x = tokens()
        for i in range(num_layers):
            flat = x.reshape(-1, WIDTH)
            experts = Experts(params["up"][i], params["down"][i], params["gate"][i])
            x = x + dense_moe(flat, params["kernel"][i], experts, TopK(2)).reshape(x.shape)
        return jnp.square(x).mean()

    params = jax.device_get(nnx.to_pure_dict(nnx.state(layers, nnx.Param)))
    want, want_gradient = jax.value_and_grad(reference)(params)
    assert stats.counts.shape == (num_layers, 1, 8, NUM_EXPERTS)
    assert float(value) == pytest.approx(float(want), rel=1e-5)
    assert_close(nnx.to_pure_dict(gradient), want_gradient, 1e-5)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.thorough
def test_tokens_on_no_mesh_go_through_a_layer_on_an_explicit_one():
    """Inputs without a mesh give outputs replicated over it."""
    outs = [make(make_mesh((8,), ("expert",), kind))(tokens())[0] for kind in (AxisType.Auto, AxisType.Explicit)]
    assert outs[1].sharding.is_fully_replicated
    np.testing.assert_allclose(*outs, rtol=1e-6)


@pytest.mark.slow
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
