"""Values out of range are refused when an object is made, by name and with the range."""

import re
from dataclasses import replace

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from jax_moe_lb import Buffers, Cost, ExpertConfig, Losses, Precision, SharedExpert, TokenInfo, TopK, Topology
from jax_moe_lb.balancers import EPLB, FEPLB, Exact, FasterMoE, Given, Greedy, HybridEP, LayerCost, RailS, UltraEP
from jax_moe_lb.collectives.peer_copy import Route
from jax_moe_lb.contrib import EPIC, LLEP, LPLB
from jax_moe_lb.core import Level
from jax_moe_lb.kernels import ClampedSwiGLU
from jax_moe_lb.routing import ExpertChoice, ForceBalanced, GroupLimit, HashRouter, NoisyTopK
from jax_moe_lb.transport import Codec, Relay, TwoPhase

INFINITE, NAN = float("inf"), float("nan")
LOGITS = jnp.zeros((4, 8))
SIZES = ("expert_bytes", "gradient_bytes", "token_bytes", "token_flops", "bytes_per_s", "flops_per_s")


def on_mesh(axis="expert", **options):
    return Topology.from_mesh(AbstractMesh((2, 4), ("data", "expert")), axis, **options)


REFUSED = {
    "every is 0; expected 1 to 46340 steps": lambda: EPLB(0),
    "every is 46341; expected 1 to 46340 steps": lambda: LPLB(46341),
    "distances of slot 1 is 0; expected at least 1": lambda: LPLB(distances=(1, 0)),
    "eps is -0.01; expected": lambda: Exact(eps=-0.01),
    "eps is inf; expected": lambda: Exact(eps=INFINITE),
    "max_fan_out is -1; expected": lambda: Exact(max_fan_out=-1),
    "num_dynamic is 0; expected": lambda: FEPLB(num_dynamic=0),
    "max_num_dyn is 0; expected": lambda: FEPLB(max_num_dyn=0),
    "tau is 0; expected": lambda: FEPLB(tau=0),
    "tau is 2147483648; expected": lambda: FEPLB(tau=2**31),
    "Given.number is 0; expected at least 1": lambda: Given(0),
    "Greedy.min_tokens is 0; expected at least 1": lambda: Greedy(0),
    "chunks is 0; expected 1 to 4096": lambda: RailS(0),
    "speeds of rail 1 is -2; expected at least 0": lambda: RailS(speeds=(1, -2)),
    "speeds is (0, 0); expected at least one speed above 0": lambda: RailS(speeds=(0, 0)),
    "expected at most 32767 times the slowest speed; round the speeds": lambda: RailS(speeds=(997, 991, 983)),
    "eps is -0.5; expected": lambda: UltraEP(-0.5),
    "eps is 1.5; expected": lambda: UltraEP(1.5),
    "UltraEP.min_tokens is 0; expected at least 1": lambda: UltraEP(min_tokens=0),
    "EPIC.min_saved is 0; expected at least 1": lambda: EPIC(0),
    "LLEP.capacity is 0.9; expected a finite number, at least 1": lambda: LLEP(0.9),
    "LLEP.min_tokens is 0; expected at least 1": lambda: LLEP(min_tokens=0),
    "LLEP.min_imbalance is 0.0; expected a finite number, at least 1": lambda: LLEP(min_imbalance=0.0),
    "Cost.token_flops is -1.0; expected a finite number above 0": lambda: Cost(token_flops=-1.0),
    "Cost.expert_bytes is inf; expected a finite number above 0": lambda: Cost(expert_bytes=INFINITE),
    "Cost.expert_bytes is nan; expected a finite number above 0": lambda: Cost(expert_bytes=NAN),
    "Cost.round_rows is 0; expected at least 1": lambda: Cost(round_rows=0),
    "Cost.max_rows is -1; expected at least 0": lambda: Cost(max_rows=-1),
    "Cost.slot_copies is -1; expected at least 0": lambda: Cost(slot_copies=-1),
    "Cost.num_copies is -1; expected at least 0": lambda: Cost(num_copies=-1),
    "min_replicas is 0; expected at least 2": lambda: Cost(relays=(0, 8, 2)),
    "LayerCost.num_copies is -1; expected at least 0": lambda: LayerCost(-1),
    "LayerCost.round_s is -1.0; expected a finite number, at least 0": lambda: LayerCost(1, round_s=-1.0),
    "device is 'h1000'; expected one with rates: a100": lambda: Cost(device="h1000"),
    "TopK.num_experts_per_tok is 0; expected at least 1": lambda: TopK(0),
    "TopK.capacity_factor is 0.0; expected a finite number above 0": lambda: TopK(2, capacity_factor=0.0),
    "num_experts_per_tok is 9; expected at most 8": lambda: TopK(9)(LOGITS),
    "num_experts_per_tok is 10; expected at most 8": lambda: ForceBalanced(TopK(10))(LOGITS),
    "num_experts_per_tok is 11; expected at most 8": lambda: HashRouter(11)(
        LOGITS, info=TokenInfo(ids=jnp.arange(4, dtype=jnp.int32))
    ),
    "num_experts_per_tok is 5; expected at most 4": lambda: TopK(5, group_limit=GroupLimit(4, 2))(LOGITS),
    "num_groups is 3; expected a divisor of the 8 experts": lambda: TopK(1, group_limit=GroupLimit(3, 2))(LOGITS),
    "top_groups is 5; expected 1 to num_groups = 4": lambda: GroupLimit(4, 5),
    "GroupLimit.experts_per_score is 0; expected at least 1": lambda: GroupLimit(4, 2, 0),
    "token_ids is None; expected the ids": lambda: HashRouter(1)(LOGITS),
    "num_experts_per_tok is 3; expected 1 to max_experts_per_tok = 2": lambda: ExpertChoice(3, 2),
    "NoisyTopK.std is -1.0; expected a finite number, at least 0": lambda: NoisyTopK(TopK(1), std=-1.0),
    "Losses.z is -1.0; expected a finite number, at least 0": lambda: Losses(z=-1.0),
    "experts.hidden_dim is -4; expected an integer from 1 to": lambda: ExpertConfig(-4),
    "experts.fuse_gate_up is True; expected False": lambda: ExpertConfig(4, gated=False, fuse_gate_up=True),
    "shared.hidden_dim is 0; expected an integer from 1 to": lambda: SharedExpert(0),
    "precision.param_dtype is int8; expected bfloat16": lambda: Precision(param_dtype=jnp.int8),
    "precision.param_dtype is None; expected bfloat16": lambda: Precision(param_dtype=None),
    "precision.transfer_dtype is bfloat16; expected": lambda: Precision(transfer_dtype=jnp.bfloat16),
    "headroom is 0.0; expected a finite number above 0": lambda: Buffers(0.0),
    "chunks is 0; expected at least 1": lambda: Buffers(chunks=0),
    "moved_headroom is 0.0; expected a finite number above 0": lambda: TwoPhase(moved_headroom=0.0),
    "Codec.ratio is 0.5; expected a finite number, at least 1": lambda: Codec(0.5),
    "Codec.ratio is nan; expected a finite number, at least 1": lambda: Codec(NAN),
    "Codec.ratio is inf; expected a finite number, at least 1": lambda: Codec(INFINITE),
    "Codec.gradient_ratio is 0.5; expected a finite number, at least 1": lambda: Codec(gradient_ratio=0.5),
    "domain_size is 0; expected at least 1": lambda: HybridEP(0),
    "min_replicas is 1; expected at least 2": lambda: Relay(min_replicas=1),
    "max_relays is 0; expected at least 1": lambda: Relay(max_relays=0),
    "min_gain is 0; expected at least 1": lambda: Relay(min_gain=0),
    "Route.timeout_s is 0.0; expected above 0": lambda: Route(("expert",), timeout_s=0.0),
    "Route.chunk_bytes is 0; expected at least 1": lambda: Route(("expert",), chunk_bytes=0),
    "max_rounds is 0; expected at least 1": lambda: Buffers(max_rounds=0),
    "ClampedSwiGLU.limit is 0.0; expected a finite number above 0": lambda: ClampedSwiGLU(0.0),
    "expert_axis names 'ep'; expected an axis of the mesh, one of ('data', 'expert')": lambda: on_mesh("ep"),
    "expert_axis is ('expert', 'expert'); expected one to three distinct": lambda: on_mesh(("expert", "expert")),
    "expert_axis is (); expected one to three distinct": lambda: on_mesh(()),
    "ranks_per_domain is 3; expected a divisor of the 4 ranks": lambda: on_mesh(ranks_per_domain=3),
    "ranks_per_domain is 0; expected at least 1": lambda: on_mesh(ranks_per_domain=0),
    "rails_per_node is 0; expected at least 1": lambda: on_mesh(rails_per_node=0),
    "bytes_per_s is (1.0, 2.0); expected one number per expert axis": lambda: on_mesh(bytes_per_s=(1.0, 2.0)),
    "Level.bytes_per_s is 0.0; expected a finite number above 0": lambda: on_mesh(bytes_per_s=(0.0,)),
    "Level.latency_s is -1.0; expected a finite number, at least 0": lambda: on_mesh(latency_s=(-1.0,)),
    "Topology.flops_per_s is -1.0; expected a finite number above 0": lambda: on_mesh(flops_per_s=-1.0),
    "Topology.ranks_per_process is 0; expected at least 1": lambda: replace(Topology.flat(2), ranks_per_process=0),
    "num_ranks is 0; expected at least 1": lambda: Topology.flat(0),
    "Level.name is 'rack'; expected one of": lambda: Level("rack", 2),
    "levels are ['gpu', 'node']; expected some of": lambda: Topology((Level("gpu", 2), Level("node", 2)), 2),
} | {
    f"FasterMoE.{name} is 0.0; expected a finite number above 0": lambda n=name: FasterMoE(**{n: 0.0}) for name in SIZES
}
"""Calls by the message of their refusal."""


@pytest.mark.parametrize("message", REFUSED)
def test_values_out_of_range_are_refused(message):
    with pytest.raises(ValueError, match=re.escape(message)):
        REFUSED[message]()
