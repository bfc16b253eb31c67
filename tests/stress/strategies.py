"""Meshes, systems, routers and losses named by programs of the random layer test."""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jax_moe_lb import (
    Buffers,
    Chain,
    HostCallback,
    Losses,
    Plan,
    System,
    TopK,
    Topology,
    exact,
    greedy,
    hybridep,
    plain,
    rails,
)
from jax_moe_lb.balancers import EPLB, FEPLB, EPLBPlus, Exact, FasterMoE, RailS, UltraEP
from jax_moe_lb.contrib import LPLB
from jax_moe_lb.layer.systems import two_tier
from jax_moe_lb.routing import ForceBalanced, GroupLimit
from jax_moe_lb.transport import (
    ExpertDomains,
    Forward,
    GatherExpertDomain,
    MultiRailDispatch,
    Once,
    PeerCopy,
    QuantizedTransfer,
    Relay,
    Saved,
    TwoPhase,
    hybrid_mesh,
)
from tests.oracle import random_plan
from tests.stress.float64_router import Rules
from tests.stress.layouts import LAYOUTS
from tests.stress.programs import Program


class Strategies(NamedTuple):
    """Constructor arguments of a layer."""

    mesh: Mesh
    topology: Topology
    system: System
    router: TopK | ForceBalanced
    losses: Losses


def strategies_of(program: Program, devices: Sequence[jax.Device]) -> Strategies:
    rules = program.rules()
    losses = Losses(rules.switch, rules.sequence, rules.z)
    mesh, topology, migrate = make_topology(program, devices)
    system = make_system(program).replace(migrate=migrate, relocates=program.homes)
    return Strategies(mesh, topology, system, make_router(rules, program.has_bias), losses)


def make_topology(program: Program, devices: Sequence[jax.Device]) -> tuple[Mesh, Topology, GatherExpertDomain | None]:
    """Return the mesh of the first of the devices, and the topology of the layer on it."""
    layout = LAYOUTS[program.layout]
    axis_type = AxisType.Explicit if program.explicit else AxisType.Auto
    mesh = Mesh(
        np.reshape(devices[: layout.shards], layout.sizes), layout.names, axis_types=(axis_type,) * len(layout.names)
    )
    # Data axes of a surrounding `shard_map` are no axes of the layer.
    around = () if program.transformation == "nested" else None
    topology = Topology.from_mesh(
        mesh,
        layout.expert_axes,
        data_axes=around,
        ranks_per_domain=layout.ranks_per_domain,
        rails_per_node=layout.rails_per_node,
    )
    if not program.gathers:
        return mesh, topology, None
    mesh = hybrid_mesh(mesh, dict(layout.split))
    domains = ExpertDomains.from_mesh(mesh, topology)
    return mesh, domains.between, GatherExpertDomain(domains)


def any_legal_plan(counts: np.ndarray, plan: Plan, topology: Topology) -> Plan:
    """Return a random plan as a function of the counts; the layer must serve any legal plan."""
    rng = np.random.default_rng(zlib.crc32(np.ascontiguousarray(counts).tobytes()))
    placement, quota = random_plan(rng, counts, plan.placement.shape[1], plan.domain)
    return replace(plan, placement=placement, quota=quota)


def make_system(program: Program) -> System:
    # A gathering layer has the experts of an expert domain at home.
    home = program.num_experts // program.num_ranks
    slots = min(2, program.num_experts - home)
    more = min(home + 1, program.num_experts - home)
    relay, any_plan = Relay(min_replicas=2, min_gain=1), HostCallback(any_legal_plan)
    # Low copy costs and thresholds, as the loads of these programs are small.
    shadows = FasterMoE(expert_bytes=1.0, gradient_bytes=1.0, token_bytes=1.0, token_flops=1.0)
    systems = {
        "plain": plain(),
        "greedy": greedy(slots),
        "ultraep": System(UltraEP(), relay, replica_slots=more),
        "exact": exact(slots),
        "two_tier": two_tier(slots),
        "hybridep": hybridep(min(home, slots)),
        "feplb": System(FEPLB(num_dynamic=1, skip=True), PeerCopy(), TwoPhase(), slots),
        "fastermoe": System(shadows, replica_slots=slots),
        "eplb": System(EPLB(every=2), replica_slots=slots),
        "eplb_plus": System(EPLBPlus(), replica_slots=slots),
        "lplb": System(LPLB(every=2), replica_slots=slots),
        "rails": rails(),
        "eplb_plus in two phases, along relays": System(EPLBPlus(), relay, TwoPhase(), slots),
        "any plan in two phases": System(any_plan, PeerCopy(), TwoPhase(), slots),
        "any plan, along relays": System(any_plan, relay, replica_slots=more),
        "any plan, sprayed": System(Chain((any_plan, RailS())), dispatch=MultiRailDispatch(), replica_slots=slots),
        "any plan, once, along relays": System(any_plan, relay, Once(), more),
        "any plan, forwarded": System(any_plan, dispatch=Forward(), replica_slots=slots),
        "experts gathered, exact": exact(slots),
        "experts gathered, exact, once": System(Exact(), dispatch=Once(), replica_slots=slots),
        "experts gathered, exact, sprayed": System(Chain((Exact(), RailS())), PeerCopy(), MultiRailDispatch(), slots),
    }
    system = systems[program.system]
    return system.replace(
        buffers=Buffers(program.headroom, program.max_rounds, program.chunks),
        transfer=make_transfer(program),
        saved=Saved(*(name in program.saved for name in ("replicas", "rows", "hidden"))),
    )


def make_transfer(program: Program) -> QuantizedTransfer | None:
    dtypes = {"float8": jnp.float8_e4m3fn, "int8": jnp.int8}
    return None if program.transfer == "none" else QuantizedTransfer(dtypes[program.transfer], program.block)


def make_router(rules: Rules, has_bias: bool) -> TopK | ForceBalanced:
    limit = None if rules.groups is None else GroupLimit(*rules.groups)
    score = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[rules.score]
    router = TopK(rules.per_tok, score, rules.renormalise, rules.scale, limit, selection_bias=has_bias)
    return ForceBalanced(router) if rules.forced else router
