"""Parameters, state and arguments of `MoE` and its Linen form."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from jax_moe_lb import (
    Balancer,
    ExpertConfig,
    Plan,
    Precision,
    System,
    TopK,
    Topology,
    as_linen,
    greedy,
)
from jax_moe_lb.nn import logical_axis_rules
from jax_moe_lb.nn.variables import BalancerState, RouterBias
from tests.layer_cases import assert_close, make_mesh
from tests.nn.moe_cases import (
    BIASED,
    INNER,
    NUM_EXPERTS,
    WIDTH,
    dense_layer,
    make,
    tokens,
)


@pytest.mark.slow
def test_parameters_carry_logical_axes_and_are_placed():
    mesh = make_mesh((2, 2, 2), ("data", "node", "gpu"))
    layer = make(mesh, expert_axis=("node", "gpu"))
    assert layer.up[...].sharding.spec == PartitionSpec(("node", "gpu"), None, None)
    assert layer.up.get_metadata()["out_sharding"] == ("exp", "embed", "mlp")
    assert layer.down.get_metadata()["out_sharding"] == ("exp", "mlp", "embed")
    assert layer.kernel[...].sharding.is_fully_replicated


@pytest.mark.slow
@pytest.mark.parametrize(
    "axis_type", [pytest.param(AxisType.Auto, marks=pytest.mark.thorough), AxisType.Explicit], ids=["auto", "explicit"]
)
@pytest.mark.thorough
def test_rules_can_shard_weights_further(axis_type):
    mesh = make_mesh((2, 4), ("data", "expert"), axis_type)
    rules = (("embed", "data"), *(rule for rule in logical_axis_rules(Topology.from_mesh(mesh)) if rule[0] != "embed"))
    layer, x = make(mesh, rules=rules), tokens(mesh, PartitionSpec(("data", "expert")))
    assert layer.up[...].sharding.spec == PartitionSpec("expert", "data", None)
    y, _ = nnx.jit(lambda layer, x: layer(x))(layer, x)
    assert_close(y, dense_layer(make(make_mesh((1,), ("expert",))), tokens()), 1e-5)


class CountingSteps(Balancer):
    """Balancer storing its number of calls and the last counts."""

    def __hash__(self):
        return 0

    def __eq__(self, other):
        return isinstance(other, CountingSteps)

    def init(self, counts_shape):
        return {"steps": np.zeros((), np.int32), "last": np.zeros(counts_shape, np.int32)}

    def rebalance(self, counts, plan: Plan, topology, state):
        return plan, {"steps": state["steps"] + 1, "last": counts}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 4), pytest.param((1, 8), marks=pytest.mark.thorough)], ids=str)
@pytest.mark.thorough
def test_balancer_state_lives_outside_the_parameters(sizes):
    layer = make(make_mesh(sizes, ("data", "expert")), System(CountingSteps()), BIASED)
    state = nnx.state(layer)
    assert set(nnx.to_pure_dict(nnx.filter_state(state, nnx.Param))) == {"kernel", "up", "down", "gate"}
    assert isinstance(state["state"], BalancerState)
    assert isinstance(state["bias"], RouterBias)

    @nnx.jit
    def step(layer, x):
        return nnx.value_and_grad(lambda layer: jnp.square(layer(x)[0]).mean())(layer)

    for _ in range(3):
        step(layer, tokens())
    remembered = layer.state.get_value()
    assert remembered["steps"].tolist() == [3] * sizes[0]
    assert int(remembered["last"].sum()) == 16 * 4 * 2


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
@pytest.mark.thorough
def test_linen_users_get_the_same_layer():
    mesh = make_mesh((8,), ("expert",))
    topology = Topology.from_mesh(mesh)
    linen = as_linen(
        WIDTH,
        NUM_EXPERTS,
        TopK(2, selection_bias=True),
        mesh=mesh,
        topology=topology,
        system=greedy(),
        experts=ExpertConfig(INNER),
    )
    variables = linen.init(jax.random.key(0), tokens())
    assert set(variables) == {"params", "RouterBias", "nnx"} or set(variables) == {"params", "RouterBias"}

    @jax.jit
    def loss(params, others, x):
        y, stats = linen.apply({"params": params, **others}, x)
        return jnp.square(y).mean(), stats

    others = {name: value for name, value in variables.items() if name != "params"}
    (value, stats), gradient = jax.value_and_grad(loss, has_aux=True)(variables["params"], others, tokens())
    assert int(stats.counts.sum()) == 128
    assert np.isfinite(value)
    assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_a_bias_that_the_router_lacks_is_not_updated():
    layer = make(make_mesh((8,), ("expert",)))
    with pytest.raises(ValueError, match=r"router.selection_bias is False; expected True, for update_bias"):
        layer.update_bias(layer(tokens())[1])


def test_the_linen_form_says_what_it_takes():
    parameters = inspect.signature(as_linen).parameters
    assert {"system", "experts", "embed_dim"} < set(parameters)
    assert "rngs" not in parameters


def test_a_narrow_dtype_is_refused_when_the_layer_is_made():
    with pytest.raises(ValueError, match=r"precision.dtype is float8_e4m3fn; expected bfloat16.*Pass transfer_dtype"):
        make(make_mesh((1,), ("expert",)), precision=Precision(jnp.float8_e4m3fn))
