"""A failing user planner, on one device or on all, gives all devices an illegal plan, and the host one message."""

import threading
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_moe_lb import HostCallback, System, Topology, raise_on_fault
from jax_moe_lb.core import plain_plan
from tests.layer_cases import Case, loses_a_token, make_mesh, sharded_moe
from tests.marks import parametrize

COUNTS = np.array([[4, 0], [3, 1]], np.int32)


def fails(counts, plan, topology):
    raise ZeroDivisionError("no load\nto divide by")


def leaves(counts, plan, topology):
    raise SystemExit(3)


def serves_elsewhere(counts, plan, topology):
    """Return a legal plan that differs from other ranks: one more token of expert 0 is served by rank 1."""
    placement, quota = plan.placement.copy(), plan.quota.copy()
    placement[1, -1] = 0
    quota[0, :2] += (-1, 1)
    return replace(plan, placement=placement, quota=quota)


class Once:
    """Planner whose third call is answered by another planner."""

    def __init__(self, other):
        self.other, self.calls, self.lock = other, 0, threading.Lock()

    def __call__(self, counts, plan, topology):
        with self.lock:
            self.calls += 1
            planner = self.other if self.calls == 3 else lambda counts, plan, topology: plan
        return planner(counts, plan, topology)


BAD = {
    "raises": (fails, r"planner raised ZeroDivisionError in \S*test_host_callback.py, line \d+: no load to divide by"),
    "exits": (leaves, r"planner raised SystemExit in \S*test_host_callback.py, line \d+: 3"),
    "illegal": (loses_a_token, r"plan.quota of expert 0 sums to \d+ tokens; expected the \d+ of counts"),
    "no plan": (lambda counts, plan, topology: None, "planner returned NoneType; expected a Plan"),
    "domain": (lambda counts, plan, topology: replace(plan, domain=1), "plan of domain 1; expected 2, as in the input"),
    "relay": (
        lambda counts, plan, topology: replace(plan, relay=plan.placement),
        "planner returned ndarray for relay; expected None, as in the input",
    ),
    "slots": (
        lambda counts, plan, topology: replace(plan, placement=plan.placement[:, :1]),
        r"planner returned an array of shape \(2, 1\); expected \(2, 2\), as in the input",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_the_message_says_what_the_planner_did(name):
    planner, message = BAD[name]
    start, topology = plain_plan(COUNTS, Topology.flat(2), 2), Topology.flat(2)
    balancer = HostCallback(planner)
    run = jax.jit(lambda counts: balancer.rebalance(counts, start, topology, ())[0])
    with pytest.raises(ValueError, match=f"^HostCallback: .*{message}"):
        balancer.raise_error_of(run(COUNTS))


@pytest.mark.parametrize("name", ["raises", "illegal", "differs"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_planner_that_fails_on_one_device_gives_all_its_error(name, check_vma):
    other = {"raises": fails, "illegal": loses_a_token, "differs": serves_elsewhere}[name]
    mesh = make_mesh((2, 2), ("data", "expert"))
    topology, balancer = Topology.from_mesh(mesh), HostCallback(Once(other))

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=(PartitionSpec("data"), PartitionSpec()),
        check_vma=check_vma,
    )
    def run(counts):
        plan, _ = balancer.rebalance(counts[0], plain_plan(counts[0], topology, 2), topology, ())
        total = jax.lax.psum(plan.quota.sum() + 0 * jax.lax.axis_index("expert"), ("data", "expert"))
        return jax.tree.map(lambda leaf: leaf[None], plan), total

    plans, _ = run(jnp.stack([COUNTS, COUNTS]))
    legal = [bool((plans.quota[i].sum(1) == COUNTS.sum(0)).all()) for i in range(2)]
    assert sorted(legal) == [False, True]
    words = {"raises": "ZeroDivisionError", "illegal": "plan.quota of expert 0", "differs": "differing between ranks"}
    with pytest.raises(ValueError, match=rf"HostCallback( on rank [01])?: .*{words[name]}"):
        balancer.raise_error_of(jax.tree.map(lambda leaf: leaf[legal.index(False)], plans))
    # The planner fails once only.
    np.testing.assert_array_equal(run(jnp.stack([COUNTS, COUNTS]))[1], 2 * 2 * COUNTS.sum())


@pytest.mark.slow
@parametrize("sizes", [(2, 4)], [(1, 8)])
def test_a_layer_goes_on_without_the_planner(sizes):
    case, mesh = Case(), make_mesh(sizes, ("data", "expert"))
    layer = sharded_moe(mesh, Topology.from_mesh(mesh), System(HostCallback(Once(fails)), replica_slots=1))
    x = jnp.ones((8 * case.num_tokens, case.width), jnp.float32)
    layer, args = jax.jit(layer), (x, jnp.ones(x.shape[0], bool), *case.params("float32"))
    y, stats = layer(*args)
    with pytest.raises(ValueError, match=r"HostCallback on rank \d: planner raised ZeroDivisionError") as caught:
        raise_on_fault(stats)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    # The planner fails once only, and the plain plan gives the same outputs.
    again, stats = layer(*args)
    raise_on_fault(stats)
    np.testing.assert_allclose(y, again, rtol=1e-5, atol=1e-6)


def test_on_numpy_arrays_errors_are_the_planners_own():
    start, topology = plain_plan(COUNTS, Topology.flat(2), 2), Topology.flat(2)
    with pytest.raises(ZeroDivisionError):
        HostCallback(fails).rebalance(COUNTS, start, topology, ())
    with pytest.raises(ValueError, match=r"plan.quota of expert 0 sums to 6 tokens; expected the 7 of counts"):
        HostCallback(loses_a_token).rebalance(COUNTS, start, topology, ())
    wide = HostCallback(lambda counts, plan, topology: replace(plan, quota=plan.quota.astype(np.int64)))
    assert wide.rebalance(COUNTS, start, topology, ())[0].quota.dtype == np.int32
