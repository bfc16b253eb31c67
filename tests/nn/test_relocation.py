"""Relocating experts between steps does not change the layer's outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

from jax_moe_lb import Losses, TopK, Topology, plain, relocate, router_loss
from jax_moe_lb.balancers.eplb import EPLB
from jax_moe_lb.layer.systems import System
from jax_moe_lb.nn import expert_bytes, restore_target
from jax_moe_lb.routing import GroupLimit
from tests.layer_cases import make_layer, make_mesh

WIDTH, INNER, NUM_EXPERTS = 16, 24, 16


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((8,), ("expert",))


def make(mesh, system=plain().replace(relocates=True)):
    # Groups of consecutive experts, and scores with many ties: both depend on the expert order of the router.
    router = TopK(
        2, score=lambda logits: jax.nn.softmax(jnp.round(logits)), group_limit=GroupLimit(4, 2), selection_bias=True
    )
    options = {"losses": Losses(switch=0.1, sequence=0.1), "topology": Topology.from_mesh(mesh, ranks_per_domain=4)}
    return make_layer(mesh, system, (WIDTH, NUM_EXPERTS, INNER), router, **options)


def permutation(seed=0):
    return np.random.default_rng(seed).permutation(NUM_EXPERTS).astype(np.int32)[None]


@nnx.jit
def train_step(layer, optimizer, x):
    def loss_of(layer):
        y, stats = layer(x)
        return jnp.square(y - x).mean() + router_loss(stats), (y, stats)

    (loss, (y, stats)), gradients = nnx.value_and_grad(loss_of, has_aux=True)(layer)
    with jax.numpy_dtype_promotion("standard"):
        optimizer.update(layer, gradients)
    layer.update_bias(stats)
    layer.update_loads(stats)
    return loss, y, stats.counts


@pytest.mark.thorough
def test_training_goes_on_as_if_nothing_had_moved(mesh):
    """One of two equal layers is relocated between steps.

    Routing is bitwise equal. The rounding of a row in a matmul depends on adjacent rows, so other values are close.
    """
    x = jax.random.normal(jax.random.key(1), (16, 4, WIDTH)) + 0.5
    stays, moves = (make(mesh) for _ in range(2))
    optimizers = [nnx.Optimizer(layer, optax.adamw(1e-2), wrt=nnx.Param) for layer in (stays, moves)]
    for layer, optimizer in zip((stays, moves), optimizers, strict=True):
        train_step(layer, optimizer, x)
    where = np.arange(NUM_EXPERTS)
    for order in (permutation(0), permutation(1)):
        where = where[order[0]]  # the expert at each place
        before = nnx.state(moves), nnx.state(optimizers[1])
        in_place = jax.jit(relocate, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, before))
        params, opt_state = in_place(*before, order)
        nnx.update(moves, params)
        nnx.update(optimizers[1], opt_state)
        loss, y, counts = train_step(stays, optimizers[0], x)
        new_loss, new_y, new_counts = train_step(moves, optimizers[1], x)
        np.testing.assert_allclose(loss, new_loss, rtol=1e-5)
        np.testing.assert_allclose(y, new_y, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(counts[..., where], new_counts)
        np.testing.assert_array_equal(np.argsort(where), moves.homes[...])
    for name in ("bias", "loads"):
        np.testing.assert_array_equal(getattr(stays, name)[...], getattr(moves, name)[...])
    for name in ("up", "down", "gate"):
        np.testing.assert_allclose(getattr(stays, name)[...][where], getattr(moves, name)[...], atol=1e-5)
        for moment in ("mu", "nu"):
            kept, moved = (getattr(optimizer.opt_state[0], moment)[name][...] for optimizer in optimizers)
            np.testing.assert_allclose(kept[where], moved, atol=1e-7)


@pytest.mark.slow
def test_experts_are_relocated_before_the_first_step(mesh):
    """The optimizer's counts are on one device until then."""
    layer = make(mesh)
    before = nnx.state(layer), nnx.state(nnx.Optimizer(layer, optax.adamw(1e-2), wrt=nnx.Param))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, restore_target(before))
    experts, order = np.asarray(layer.up[...]), permutation()
    params, opt_state = jax.jit(relocate, out_shardings=shardings)(*before, order)
    np.testing.assert_array_equal(params["up"].get_value(), experts[order[0]])
    assert opt_state["opt_state"][0]["count"].get_value().sharding.mesh == mesh


def tree(**changes):
    layer = {"kernel": np.zeros((3, 4)), "up": np.zeros((4, 3, 5)), "down": np.zeros((4, 5, 3))}
    return {"moe": layer | {"homes": np.arange(4, dtype=np.int32)} | changes}


def test_only_leaves_of_experts_move():
    order = np.array([[2, 0, 3, 1]], np.int32)
    params = tree(up=np.arange(60.0).reshape(4, 3, 5)) | {"dense": {"kernel": np.ones((3, 4)), "up": np.ones((4, 4))}}
    params["norm"] = tree(kernel=np.ones(3))["moe"]
    opt_state = {"mu": tree(up=params["moe"]["up"] + 1), "count": np.ones(4), "up": np.arange(4.0)}
    new_params, new_state = relocate(params, opt_state, order)
    np.testing.assert_array_equal(new_params["moe"]["up"], params["moe"]["up"][order[0]])
    np.testing.assert_array_equal(new_params["moe"]["homes"], [1, 3, 0, 2])
    np.testing.assert_array_equal(new_state["mu"]["moe"]["up"], params["moe"]["up"][order[0]] + 1)
    assert new_state["up"] is opt_state["up"]
    assert new_params["dense"]["up"] is params["dense"]["up"]
    # Up and down of 15 float64 each, in the parameters and in one moment.
    assert expert_bytes(params, opt_state) == 2 * 2 * 15 * 8


@pytest.mark.slow
def test_experts_on_explicit_axes_keep_their_sharding():
    layer = make(make_mesh((8,), ("expert",), AxisType.Explicit))
    before, order = layer.up[...], permutation()
    moved = relocate(nnx.state(layer), (), order)[0]["up"].get_value()
    np.testing.assert_array_equal(moved, np.asarray(before)[order[0]])
    assert moved.sharding == before.sharding


def without_homes():
    layer = tree()["moe"]
    del layer["homes"]
    return {"moe": layer}


ORDER = np.arange(4, dtype=np.int32)[None]
SIZES = {
    "a": tree()["moe"],
    "b": tree(kernel=np.zeros((3, 8)), up=np.zeros((8, 3, 5)), down=np.zeros((8, 5, 3)))["moe"],
}
REFUSED = {
    "no layer": ({"dense": {"kernel": np.ones((3, 4))}}, {}, ORDER, "params have no MoE layer; expected"),
    "layers": (tree(), {}, np.tile(ORDER, (2, 1)), r"permutation has shape \(2, 4\); expected \[1, 4\]"),
    "sizes": (SIZES, {}, np.tile(ORDER, (2, 1)), "b has 8 experts; expected 4, as the first layer"),
    "homes": (without_homes(), {}, ORDER, "moe has no homes; expected an MoE whose system has relocates=True"),
    "twice": (tree(), {}, ORDER // 2, "permutation of layer 0 has 0 2 times; expected a permutation of 0 to 3"),
    "factored": (tree(), {"v_row": {"moe": {"up": np.ones((4, 3))}}}, ORDER, r"v_row.moe.up has shape \[4, 3\]; exp"),
}


@pytest.mark.parametrize(("params", "opt_state", "order", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(params, opt_state, order, message):
    with pytest.raises(ValueError, match=message):
        relocate(params, opt_state, order)


@pytest.mark.slow
def test_homes_that_are_no_permutation_are_a_fault(mesh):
    layer = make(mesh)
    layer.homes[...] = layer.homes[...] // 2
    with pytest.raises(ValueError, match="homes of layer 0 has 0 2 times"):
        layer(jnp.ones((16, 4, WIDTH)))


@pytest.mark.slow
def test_layers_that_cannot_move(mesh):
    with pytest.raises(ValueError, match=r"system.relocates is True; expected False with EPLB"):
        make(mesh, System(balancer=EPLB(), replica_slots=1, relocates=True))
    layer, x = make(mesh, plain()), jnp.ones((16, 4, WIDTH))
    stats = jax.eval_shape(lambda x: layer(x)[1], x)
    with pytest.raises(ValueError, match=r"system.relocates is False; expected True"):
        layer.update_loads(stats)
    with pytest.raises(ValueError, match=r"decay is 1.0; expected"):
        make(mesh).update_loads(stats, decay=1.0)
