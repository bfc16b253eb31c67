"""UltraEP's planner on the loads of its paper's simulations (Table 3 and figure 15), and how long it takes on a CPU.

Run it with `python -m benchmarks.bench_ultraep`; `--tokens 512` for a quick look.
"""

import argparse

import numpy as np

from benchmarks.popular_ranks import CASES, TOKENS_PER_RANK, Case, counts
from benchmarks.timing import interleaved_s, summary
from jax_moe_lb import Topology, _planning, imbalance, load, plain_plan, traffic
from jax_moe_lb.plan import Plan

PUBLISHED = "| mean, published | | 1.03 | 45 | 6.8 | 96.0 |"


def planned(case: Case, loads: np.ndarray) -> tuple[Plan, Plan]:
    """Before and after."""
    slots = case.num_experts // case.num_ranks + case.replica_slots
    before = plain_plan(loads, Topology.flat(case.num_ranks), slots)
    # The paper's floor of 1024 tokens, for 8192 tokens on a rank.
    min_tokens = max(1, loads.sum() // case.num_ranks // 64)
    after = _planning.ultraep(before.placement, before.quota, case.num_ranks, min_tokens=min_tokens)
    return before, Plan(*after, domain=case.num_ranks)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS_PER_RANK, help="tokens on each rank")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print("| experts, ranks, replica slots | before | after | replicas | of one expert | remote rows % | planning us |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for case in CASES:
        loads = counts(case, args.seed, args.tokens)
        before, after = planned(case, loads)
        copies = np.bincount(after.placement[:, after.num_home :].reshape(-1) + 1, minlength=case.num_experts + 1)[1:]
        remote = 100 * traffic(after, loads).rows / loads.sum()
        results = (imbalance(load(after)), copies.sum(), copies.max(), remote)
        time_s = interleaved_s({"plan": lambda case=case, loads=loads: planned(case, loads)}, 30)["plan"]
        rows.append(results)
        shape = f"{case.num_experts}, {case.num_ranks}, {case.replica_slots}"
        columns = f"{results[0]:.3f} | {results[1]} | {results[2]} | {remote:.1f} | {summary(time_s, 1e6, 0)}"
        print(f"| {shape} | {imbalance(load(before)):.2f} | {columns} |")
    mean = np.mean(rows, axis=0)
    print(f"| mean | | {mean[0]:.3f} | {mean[1]:.1f} | {mean[2]:.1f} | {mean[3]:.1f} | |")
    print(PUBLISHED + " 111 (on a GPU) |")


if __name__ == "__main__":
    main()
