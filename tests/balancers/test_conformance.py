"""Rules of every balancer and system, on every workload."""

import itertools
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from benchmarks.layer.workloads import WORKLOADS
from jax_moe_lb import (
    Balancer,
    Buffers,
    Chain,
    HostCallback,
    MoEParams,
    MoEState,
    Plan,
    System,
    TokenInfo,
    TopK,
    Topology,
    exact,
    greedy,
    hybridep,
    moe,
    plain,
    rails,
)
from jax_moe_lb.balancers import EPLB, FEPLB, EPLBPlus, Exact, FasterMoE, Given, Greedy, HybridEP, Plain, RailS, UltraEP
from jax_moe_lb.contrib import LPLB, MoonEP
from jax_moe_lb.core import check_plan, load, plain_plan, traffic
from jax_moe_lb.sim.planner_times import WITH_KERNEL, Place, planner_time, planning_s
from jax_moe_lb.transport import Forward, MultiRailDispatch, Once, PeerCopy, Relay, TwoPhase
from tests.balancers.fields import kinds, made
from tests.layer_cases import (
    Case,
    assert_close,
    assert_equals_dense,
    dense_with_gradients,
    make_mesh,
    sharded_moe,
    with_gradients,
)
from tests.marks import parametrize


def swap_halves(counts: np.ndarray, plan: Plan, topology: Topology) -> Plan:
    """Plan on the host: the first expert of each rank shares its tokens with the next rank of its domain."""
    placement, quota = plan.placement.copy(), plan.quota.copy()
    for rank in range(plan.num_ranks):
        helper = rank // plan.domain * plan.domain + (rank + 1) % plan.domain
        expert = placement[rank, 0]
        if helper != rank:
            placement[helper, plan.num_home] = expert
            half = quota[expert, rank] // 2
            quota[expert] += half * ((np.arange(plan.num_ranks) == helper) - 1 * (np.arange(plan.num_ranks) == rank))
    return Plan(placement, quota, domain=plan.domain)


BALANCERS = {kind: made(kind) for kind in kinds()} | {
    HostCallback: HostCallback(swap_halves),
    Chain: Chain((HostCallback(swap_halves), Greedy())),
}
"""All exported balancers, with options for small loads; a new one is tested with its defaults."""

SYSTEMS = {
    "plain": plain(),
    "greedy": greedy(),
    # In domains of 4 ranks an expert has at most 3 replicas.
    "ultraep": System(UltraEP(), replicate=Relay(min_replicas=3, min_gain=1), replica_slots=4),
    "exact": exact(),
    "greedy in small rounds": greedy(buffers=Buffers(headroom=0.4), replica_slots=1),
    "feplb": System(FEPLB(num_dynamic=1, skip=True), PeerCopy(), TwoPhase(), replica_slots=2),
    # Experts move in part, in several rounds, and some do not fit.
    "greedy in two phases": System(Greedy(), dispatch=TwoPhase(Buffers(0.6), moved_headroom=0.3), replica_slots=2),
    "fastermoe": System(BALANCERS[FasterMoE], replica_slots=2),
    "eplb": System(EPLB(every=1), replica_slots=2),
    "eplb_plus": System(EPLBPlus(), replica_slots=2),
    "lplb": System(LPLB(), replica_slots=1),
    "host": System(BALANCERS[HostCallback], replica_slots=1),
    "chain": System(BALANCERS[Chain], replica_slots=3),
    "rails": rails(Buffers(0.6)),
    "hybridep": hybridep(),
    "exact inside expert domains, sprayed": System(
        Chain((HybridEP(2), Exact(), RailS())), dispatch=MultiRailDispatch(Buffers(0.6)), replica_slots=4
    ),
    "peer copies": System(Greedy(), replicate=PeerCopy(), replica_slots=2),
    # Two phases without a fused native planner: `start` and `join` with work between them.
    "exact in two phases": System(Exact(), PeerCopy(), TwoPhase(), replica_slots=2),
    "eplb_plus in two phases, along relays": System(
        EPLBPlus(), Relay(min_replicas=3, min_gain=1), TwoPhase(), replica_slots=4
    ),
    "plain, once in small rounds": System(dispatch=Once(Buffers(0.4))),
    "ultraep, once": System(UltraEP(), Relay(min_replicas=3, min_gain=1), Once(Buffers(0.6)), replica_slots=4),
    "exact, once, peer copies": System(Exact(), PeerCopy(), Once(), replica_slots=2),
    "exact, forwarded in small rounds": System(Exact(), dispatch=Forward(Buffers(0.4, chunks=2)), replica_slots=2),
    "ultraep, forwarded": System(UltraEP(), Relay(min_replicas=3, min_gain=1), Forward(Buffers(0.6)), replica_slots=4),
    "hybridep inside nodes, forwarded": System(HybridEP(2), dispatch=Forward(), replica_slots=2),
}
ON_RAILS = {"rails", "exact inside expert domains, sprayed"}
ON_NODES = ON_RAILS | {name for name in SYSTEMS if "forwarded" in name}
"""Systems that require mesh axes for nodes, and some of them rails."""

# ranks, ranks per domain, experts, slots
SHAPES = [(8, 8, 16, 4), (8, 4, 16, 3), (8, 2, 8, 3), (1, 1, 4, 4), (6, 3, 18, 4)]


# `make check` plans for one shape, and for one rank.
CHECKED_SHAPES = [
    shape if at in (1, 3) else pytest.param(shape, marks=pytest.mark.slow) for at, shape in enumerate(SHAPES)
]


@pytest.mark.parametrize("shape", CHECKED_SHAPES, ids=str)
@pytest.mark.parametrize("balancer", BALANCERS.values(), ids=lambda b: type(b).__name__)
def test_plans_are_legal_and_deterministic(balancer, shape):
    runs = [host_plans(balancer, Topology.flat(*shape[:2]), *shape[2:]) for _ in range(2)]
    for (plan, counts), (again, _) in zip(*runs, strict=True):
        check_plan(plan, counts)
        assert shape[1] % plan.domain == 0  # A plan may narrow the domain, but not widen it.
        jax.tree.map(np.testing.assert_array_equal, plan, again)


def host_plans(balancer, topology, num_experts, slots, num_tokens=50, seeds=3):
    """Yield plan and counts of every workload, planned on the host with the previous state."""
    state = balancer.init((topology.num_ranks, num_experts))
    for workload in WORKLOADS:
        for seed in range(seeds):
            counts = workload.counts(seed, topology.num_ranks, num_tokens, num_experts, 2)
            plan, state = balancer.rebalance(counts, plain_plan(counts, topology, slots), topology, state)
            yield plan, counts


@pytest.mark.parametrize(
    "balancer",
    [EPLBPlus(), Exact(localize=False), FEPLB(), Greedy(), MoonEP(), UltraEP(min_tokens=1)],
    ids=lambda b: type(b).__name__,
)
def test_domains_are_planned_each_for_itself(balancer):
    """These plan by the totals of experts: tokens of other domains count, on any rank."""
    counts = WORKLOADS[2].counts(0, 16, 512, 64, 4)

    def plan_for(counts, topology):
        return balancer.rebalance(counts, plain_plan(counts, topology, 8), topology, ())[0]

    plan = plan_for(counts, Topology.flat(16, 4))
    for first in range(0, 16, 4):
        ranks, home = slice(first, first + 4), slice(4 * first, 4 * first + 16)
        alone = plan_for(counts[:, home].reshape(4, 4, 16).sum(0, dtype=np.int32), Topology.flat(4))
        np.testing.assert_array_equal(plan.quota[home, ranks], alone.quota)
        np.testing.assert_array_equal(
            plan.placement[ranks], np.where(alone.placement < 0, -1, alone.placement + 4 * first)
        )


@pytest.mark.parametrize("balancer", BALANCERS.values(), ids=lambda b: type(b).__name__)
def test_planners_in_kernels_of_gpus_do_not_wait_for_the_host(balancer):
    """Kernels take domains of at most 128 ranks; see `tests/planners/test_kernels.py` for their programs."""
    sizes = (64, 64), (128, 128), (256, 256), (256, 8)
    waits = [planning_s(balancer, *one, 256, 1.0) - planning_s(balancer, *one, 256, 0.0) for one in sizes]
    if isinstance(balancer, WITH_KERNEL):
        assert waits == pytest.approx([0.0, 0.0, 1.0, 0.0])
        # Kernels have measured rows of their own, slower than C++ on a host. Larger domains take longer.
        measured = planner_time("Exact", Place.KERNEL, 64, 256).time
        assert planning_s(balancer, 64, 64, 256, 0.0) == measured > 1e-4
        assert planning_s(balancer, 128, 128, 256, 0.0) == 2 * measured
        # Blocks plan all domains at once.
        assert planning_s(balancer, 64, 8, 256, 0.0) == planner_time("Exact", Place.KERNEL, 8, 32).time


@pytest.mark.slow
# Other shapes compile the same code with other constants.
@parametrize("shape", SHAPES[1:2], SHAPES, ids=str)
@pytest.mark.parametrize("balancer", BALANCERS.values(), ids=lambda b: type(b).__name__)
def test_jitted_plans_equal_host_plans_and_compile_once(balancer, shape):
    num_ranks, domain, num_experts, slots = shape
    topology = Topology.flat(num_ranks, domain)

    @jax.jit
    def rebalance(counts, state):
        return balancer.rebalance(counts, plain_plan(counts, topology, slots), topology, state)

    state = jax.tree.map(jnp.asarray, balancer.init((num_ranks, num_experts)))
    for want, counts in host_plans(balancer, topology, num_experts, slots):
        plan, state = rebalance(jnp.asarray(counts), state)
        jax.tree.map(np.testing.assert_array_equal, plan, want)
    assert rebalance._cache_size() == 1


@dataclass(frozen=True)
class GivenPlan(Balancer):
    """Balancer whose state is the plan, so that one compiled layer runs all plans."""

    def rebalance(self, counts, plan, topology, state):
        return state, state


def layer_of_plan(mesh, topology, system):
    """Return the jitted `(plan, x, mask, kernel, experts, target) -> ((y, stats), gradients)`."""

    def run(plan, *operands):
        def one_rank(plan, x, mask, kernel, experts):
            params, state, info = MoEParams(kernel, experts), MoEState(plan), TokenInfo(mask=mask)
            y, stats, _ = moe(x, params, TopK(2), system, topology, state, info)
            return y, stats.of_group

        whole, ranks = PartitionSpec(), PartitionSpec(topology.expert_axes)
        specs = {"in_specs": (whole, ranks, ranks, whole, ranks), "out_specs": (ranks, PartitionSpec(None))}
        return with_gradients(partial(jax.shard_map(one_rank, mesh=mesh, **specs), plan))(*operands)

    return jax.jit(run)


# HybridEP changes the domain and UltraEP the split, which are static; RailS requires rails.
PLANNED = {kind: balancer for kind, balancer in BALANCERS.items() if kind not in (Given, HybridEP, RailS, UltraEP)}


@pytest.mark.slow
def test_layer_of_every_balancers_plans_equals_dense(x64):
    """Outputs and gradients of tokens, router and experts; one compilation for all plans."""
    case, mesh = Case(), make_mesh((8,), ("expert",))
    topology = Topology.from_mesh(mesh, ("expert",), ranks_per_domain=4)
    layer, replicas = layer_of_plan(mesh, topology, System(GivenPlan(), replica_slots=2)), {}
    operands = [case.arguments(workload, 8, "float64", "float64") for workload in WORKLOADS]
    wanted = [dense_with_gradients(TopK(2))(*args) for args in operands]
    for kind, balancer in PLANNED.items():
        plans = host_plans(balancer, topology, case.num_experts, 4, case.num_tokens, seeds=1)
        replicas[kind] = 0
        for (plan, counts), args, ((want, _), want_gradients) in zip(plans, operands, wanted, strict=True):
            (y, stats), gradients = layer(jax.tree.map(jnp.asarray, plan), *args)
            assert_close((y, gradients), (want, want_gradients), 1e-12)
            np.testing.assert_array_equal(stats.counts[0], counts)
            np.testing.assert_array_equal(stats.load_after[0], load(plan))
            replicas[kind] += int(traffic(plan, counts).replicas)
    assert layer._cache_size() == 1
    assert [kind for kind, number in replicas.items() if number == 0] == [Plain]


# Balancers edit integers, so other dtypes are tested once per transport.
TRANSPORTS = ("ultraep", "feplb", "ultraep, once", "exact, forwarded in small rounds")
RELATIVE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 4e-2}
INTEGRATED = [("ultraep", "float64"), ("exact, forwarded in small rounds", "float64")]
"""Relays, and lists of rows in several rounds, each with one balancer.

`test_layer_of_every_balancers_plans_equals_dense` covers the other balancers, `test_rounds` several rounds and
`test_two_phase` two phases.
"""


@pytest.mark.slow
@parametrize(
    "name, dtype",
    INTEGRATED,
    [*itertools.product(SYSTEMS, ["float64"]), *itertools.product(TRANSPORTS, ["float32", "bfloat16"])],
)
def test_layer_equals_dense(name, dtype, x64):
    """Outputs and gradients of tokens, router and experts; one compilation for all workloads."""
    sizes, axes = ((2, 4), ("domain", "rail")) if name in ON_NODES else ((8,), ("expert",))
    mesh, num_rails = make_mesh(sizes, axes), 4 if name in ON_RAILS else 1
    topology = Topology.from_mesh(mesh, axes, ranks_per_domain=4, rails_per_node=num_rails)
    layer = with_gradients(sharded_moe(mesh, topology, SYSTEMS[name]))
    for workload in WORKLOADS:
        args = Case().arguments(workload, 8, dtype, "float64")
        stats = assert_equals_dense(layer, args, RELATIVE[dtype])
        assert int(stats.counts.sum()) == int(stats.load_after.sum()) == 2 * int(args[1].sum())
    assert layer._cache_size() == 1
