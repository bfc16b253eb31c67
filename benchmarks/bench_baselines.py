"""EPLB+ and LPLB on the loads of UltraEP's simulations (table 3 of arXiv 2606.04101), means over 15 cases.

Run it with `python -m benchmarks.bench_baselines`.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import popular_ranks
from benchmarks.results import Table, out_alone, report
from jax_moe_lb import Topology
from jax_moe_lb.balancers import EPLBPlus
from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.contrib import LPLB
from jax_moe_lb.core import imbalance, load, plain_plan
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.planners import rebalance_experts


def planned(balancer: Balancer, case: popular_ranks.Case, counts: np.ndarray) -> Plan:
    """Return the plan for a load that is already in the history."""
    topology = Topology.flat(case.num_ranks)
    slots = case.num_experts // case.num_ranks + case.replica_slots
    args = jax.device_put((counts, plain_plan(counts, topology, slots)))
    step = jax.jit(lambda state, counts, plan: balancer.rebalance(counts, plan, topology, state))
    _, state = step(jax.device_put(balancer.init(counts.shape)), *args)
    plan, _ = step(state, *args)
    return jax.tree.map(np.asarray, plan)


def row_of(plan: Plan) -> tuple[float, ...]:
    """Return imbalance, replicas, and maximum replicas of an expert."""
    replicas = plan.placement[:, plan.num_home :]
    copies = np.bincount(replicas[replicas >= 0], minlength=plan.num_experts)
    return float(imbalance(load(plan))), copies.sum(), copies.max()


def packed_afresh(case: popular_ranks.Case, counts: np.ndarray, rebalance: Callable) -> tuple[float, ...]:
    """Return the same numbers for EPLB's own algorithm, `rebalance_experts`, on the exact load; home experts move."""
    tokens, num_slots = counts.sum(0), case.num_experts + case.num_ranks * case.replica_slots
    experts, _, copies = rebalance(tokens[None], num_slots, 1, 1, case.num_ranks)
    loads = (tokens / copies[0])[experts[0]].reshape(case.num_ranks, -1).sum(1)
    return loads.max() / loads.mean(), copies.sum() - case.num_experts, copies.max() - 1


def main() -> None:
    """Report the table."""
    out = out_alone(__doc__)
    rows: dict[str, list[tuple[float, ...]]] = {}
    for case in popular_ranks.CASES:
        counts = popular_ranks.counts(case, seed=0)
        before = plain_plan(jnp.asarray(counts), Topology.flat(case.num_ranks))
        results = {
            "plain": (float(imbalance(load(before))), 0, 0),
            "EPLB+, homes stay": row_of(planned(EPLBPlus(), case, counts)),
            "EPLB+, all packed afresh": packed_afresh(case, counts, rebalance_experts),
            "the same, no copy twice on a rank": packed_afresh(case, counts, partial(rebalance_experts, distinct=True)),
            "LPLB, history of the same load": row_of(planned(LPLB(every=1), case, counts)),
        }
        for name, row in results.items():
            rows.setdefault(name, []).append(row)
    columns = {
        "balancer": "",
        "imbalance": ".3f",
        "replicas": ".1f",
        "max. replicas of an expert": ".2f",
    }
    means = {name: np.mean(of_cases, axis=0).tolist() for name, of_cases in rows.items()}
    table = Table(columns, [[name, *row] for name, row in means.items()])
    report({"balancers": table}, out)


if __name__ == "__main__":
    main()
