"""A fault gives the caller one error with one message, and every later call in the process works."""

import functools
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jax_moe_lb import Chain, HostCallback, System, Topology, greedy, raise_on_fault
from jax_moe_lb.balancers import RailS
from jax_moe_lb.core.stats import NO_FAULT, PLAN, ROUTING
from jax_moe_lb.transport import MultiRailDispatch
from tests.layer_cases import loses_a_token, make_layer, make_mesh

NOT_FINITE = "router logits of rank 0 give weights that are not finite; expected finite logits"
X = jax.random.normal(jax.random.key(0), (8, 4, 8))


@functools.cache
def layer():
    return make_layer(make_mesh((4,), ("expert",)), greedy(1))


def loss(layer, x):
    y, stats = layer(x)
    return (y**2).sum(), stats


@pytest.mark.slow
def test_an_eager_call_raises_once_and_later_calls_work(capfd):
    bad = X.at[0, 0, 0].set(jnp.nan)
    before, _ = layer()(X)
    for call in (layer(), nnx.grad(lambda layer, x: loss(layer, x)[0])):
        arguments = (bad,) if call is layer() else (layer(), bad)
        with pytest.raises(ValueError, match="not finite") as caught:
            call(*arguments)
        assert str(caught.value) == NOT_FINITE
    np.testing.assert_array_equal(layer()(X)[0], before)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_jitted_step_returns_the_fault(capfd):
    step = nnx.jit(nnx.grad(loss, has_aux=True))
    for x, code in ((X.at[0, 0, 0].set(jnp.nan), ROUTING), (X, NO_FAULT)):
        gradients, stats = step(layer(), x)
        assert stats.fault.code.tolist() == [code]
        assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradients)) == (code == NO_FAULT)
    assert capfd.readouterr() == ("", "")
    with pytest.raises(
        TypeError, match="stats is traced; expected concrete arrays: return it from the jitted function"
    ):
        nnx.jit(lambda layer, x: raise_on_fault(layer(x)[1]))(layer(), X)


@pytest.mark.slow
def test_a_fault_in_a_pipeline_stage():
    """Checks on the host hung here until XLA ended the process, if gradients were taken."""
    mesh = make_mesh((2, 2), ("stage", "expert"))
    graph, state = nnx.split(make_layer(mesh, greedy(1), topology=Topology.from_mesh(mesh, data_axes=())))

    def stage(x):
        y, stats = nnx.merge(graph, state)(x)
        return y, jax.tree.map(lambda leaf: leaf[None], stats)

    over_stages = jax.shard_map(
        stage,
        mesh=mesh,
        in_specs=PartitionSpec("stage"),
        out_specs=PartitionSpec("stage"),
        axis_names={"stage"},
        check_vma=False,
    )

    @jax.jit
    def step(x):
        def loss(x):
            y, stats = over_stages(x)
            return (y**2).sum(), stats

        return jax.grad(loss, has_aux=True)(x)

    gradient, stats = step(X.at[4, 0, 0].set(jnp.nan))
    assert stats.fault.code.tolist() == [[NO_FAULT], [ROUTING]]
    assert np.isfinite(np.asarray(gradient)[:4]).all()
    with pytest.raises(ValueError, match=f"^entry 1: {NOT_FINITE}$"):
        raise_on_fault(stats)
    raise_on_fault(step(X)[1])
    # By default all axes without experts are data axes.
    graph, state = nnx.split(make_layer(mesh, greedy(1)))
    with pytest.raises(ValueError, match=r"topology has the axes \['stage'\], which are manual already"):
        jax.eval_shape(over_stages, X)


def failing(counts, plan, topology):
    raise ZeroDivisionError("no load to divide by")


@pytest.mark.slow
def test_a_failing_planner_gives_its_own_traceback_once(capfd):
    layer = make_layer(make_mesh((4,), ("expert",)), System(HostCallback(failing), replica_slots=1))
    with pytest.raises(
        ValueError, match=r"^HostCallback on rank \d: planner raised ZeroDivisionError in \S+, line"
    ) as e:
        layer(X)
    assert capfd.readouterr() == ("", "")
    cause = e.value.__cause__
    assert isinstance(cause, ZeroDivisionError)
    assert [frame.name for frame in traceback.extract_tb(cause.__traceback__)] == ["failing"]
    printed = "".join(traceback.format_exception(e.value))
    assert printed.count("ZeroDivisionError: no load to divide by") == printed.count("in failing\n") == 1


@pytest.mark.thorough
@pytest.mark.parametrize("planner", [failing, loses_a_token])
def test_a_balancer_after_a_failed_one_gets_a_legal_plan(planner):
    """The custom call of `RailS` stops the program on an illegal plan."""
    mesh = make_mesh((2, 2), ("node", "gpu"))
    topology = Topology.from_mesh(mesh, ("node", "gpu"), rails_per_node=2)
    layer = make_layer(
        mesh, System(Chain((HostCallback(planner), RailS())), dispatch=MultiRailDispatch()), topology=topology
    )
    y, stats = nnx.jit(lambda layer, x: layer(x))(layer, X)
    assert stats.fault.code.tolist() == [PLAN]
    assert np.isfinite(y).all()
    with pytest.raises(
        ValueError, match=r"^HostCallback on rank \d: .*(no load to divide by|expected the \d+ of counts)"
    ):
        raise_on_fault(stats)
