"""Plans of baselines beside outputs of their authors' rules.

`published_plans.json` has synthetic inputs, and the outputs of `compute_llep_lpt_plan` of SalesforceAIResearch's
LeastLoadedEP, of the planning reference in a public copy of MoonEP, and of the rule of FastMoE's `shadow_policy.py` for
the tokens of each expert. The first two need no limit of slots; the last one has one expert per rank.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.plans import popular_ranks
from benchmarks.plans.load_families import spread
from jax_moe_lb.balancers import EPLBPlus, FasterMoE, UltraEP
from jax_moe_lb.contrib import LLEP, MoonEP
from jax_moe_lb.core import imbalance, load, traffic
from jax_moe_lb.core.split import Split
from tests.balancers.plans import plan_for

CASES = json.loads((Path(__file__).parent / "published_plans.json").read_text())


@pytest.mark.parametrize("case", CASES["LLEP"], ids=range(len(CASES["LLEP"])))
def test_llep_spills_as_its_authors_code(case):
    tokens, ranks = np.array(case["tokens"], np.int32), case["ranks"]
    plan = plan_for(LLEP(case["capacity"], case["min_tokens"], 1.0), spread(tokens, ranks), len(tokens))
    home = np.arange(len(tokens)) * ranks // len(tokens)
    want = np.where(home[:, None] == np.arange(ranks), tokens[:, None], 0)
    for expert, rank, moved in case["moved"]:
        want[expert, [home[expert], rank]] += [-moved, moved]
    np.testing.assert_array_equal(plan.quota, want)
    assert load(plan).tolist() == case["loads"]


@pytest.mark.parametrize("case", CASES["MoonEP"], ids=range(len(CASES["MoonEP"])))
def test_moonep_allocates_as_the_reference_of_its_kernel(case):
    counts = np.array(case["counts"], np.int32)
    plan = plan_for(MoonEP(), counts, counts.shape[1])
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
        counts = np.array(case["counts"], np.int32)
        replicas = plan_for(balancer, counts, counts.shape[1]).placement[:, 1:]
        copied = np.unique(replicas[replicas >= 0]).tolist()
        assert set(copied) <= set(case["copied"])
        equal += copied == case["copied"]
    assert equal == len(CASES["FasterMoE"]) - 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("balancer", "num_tokens", "published"),
    [(UltraEP(min_tokens=256), 2048, (1.03, 45, 6.8, 96.0, 98.4)), (EPLBPlus(), 1024, (1.193, 106.7, 8.47))],
    ids=["UltraEP", "EPLB+"],
)
def test_means_of_ultraeps_simulations(balancer, num_tokens, published):
    """Table 3: 15 loads on 64 ranks, with a part of its 8192 tokens per rank and of `min_tokens`.

    Imbalance, replicas, copies of an expert at most, and remote rows in percent, with locality and without.
    """
    results = []
    for case in popular_ranks.CASES:
        counts = popular_ranks.counts(case, seed=0, num_tokens=num_tokens)
        plan = plan_for(balancer, counts, case.num_experts // case.num_ranks + case.replica_slots)
        replicas = plan.placement[:, plan.num_home :]
        copies = np.bincount(replicas[replicas >= 0], minlength=case.num_experts)
        anywhere = replace(plan, split=Split("proportional", locality=False))
        remote = [100 * traffic(one, counts).rows / counts.sum() for one in (plan, anywhere)]
        results.append((imbalance(load(plan)), copies.sum(), copies.max(), *remote))
    np.testing.assert_allclose(np.mean(results, 0)[: len(published)], published, rtol=0.02)
