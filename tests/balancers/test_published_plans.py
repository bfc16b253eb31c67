"""Plans of baselines beside outputs of their authors' rules.

`published_plans.json` has synthetic inputs, and the outputs of `compute_llep_lpt_plan` of SalesforceAIResearch's
LeastLoadedEP, of the planning reference in a public copy of MoonEP, and of the rule of FastMoE's `shadow_policy.py` for
the tokens of each expert. The first two need no limit of slots; the last one has one expert per rank.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.plans.load_families import spread
from jax_moe_lb import Balancer, Topology
from jax_moe_lb.balancers import FasterMoE
from jax_moe_lb.contrib import LLEP, MoonEP
from jax_moe_lb.core import Plan, load, plain_plan

CASES = json.loads((Path(__file__).parent / "published_plans.json").read_text())


def plan_for(balancer: Balancer, counts: np.ndarray) -> Plan:
    topology = Topology.flat(len(counts))
    start = plain_plan(counts, topology, counts.shape[1])
    return balancer.rebalance(counts, start, topology, ())[0]


@pytest.mark.parametrize("case", CASES["LLEP"], ids=range(len(CASES["LLEP"])))
def test_llep_spills_as_its_authors_code(case):
    tokens, ranks = np.array(case["tokens"], np.int32), case["ranks"]
    plan = plan_for(LLEP(case["capacity"], case["min_tokens"], 1.0), spread(tokens, ranks))
    home = np.arange(len(tokens)) * ranks // len(tokens)
    want = np.where(home[:, None] == np.arange(ranks), tokens[:, None], 0)
    for expert, rank, moved in case["moved"]:
        want[expert, [home[expert], rank]] += [-moved, moved]
    np.testing.assert_array_equal(plan.quota, want)
    assert load(plan).tolist() == case["loads"]


@pytest.mark.parametrize("case", CASES["MoonEP"], ids=range(len(CASES["MoonEP"])))
def test_moonep_allocates_as_the_reference_of_its_kernel(case):
    plan = plan_for(MoonEP(), np.array(case["counts"], np.int32))
    np.testing.assert_array_equal(plan.quota, case["served"])


def test_fastermoe_copies_the_experts_of_the_released_rule_or_fewer():
    """The released rule compares the tokens of experts; here a rank also serves its own tokens of copied experts."""
    equal = 0
    for case in CASES["FasterMoE"]:
        width, expert_bytes = case["width"], 2 * 2 * case["width"] ** 2 * 4  # two matrices, inner width twice as large
        balancer = FasterMoE(
            expert_bytes=expert_bytes / 2,
            gradient_bytes=expert_bytes / 2,
            token_bytes=4.0 * width,
            token_flops=8.0 * width**2,
            bytes_per_s=float(case["bytes_per_s"]),
            flops_per_s=float(case["flops_per_s"]),
        )
        replicas = plan_for(balancer, np.array(case["counts"], np.int32)).placement[:, 1:]
        copied = np.unique(replicas[replicas >= 0]).tolist()
        assert set(copied) <= set(case["copied"])
        equal += copied == case["copied"]
    assert equal == len(CASES["FasterMoE"]) - 1
