"""UltraEP on the loads of its paper's simulations (Table 3, figures 15 and 16), and how long planning takes on a CPU.

The second table has what the split and the relays do: rows between the two ranks that exchange most, and copies of an
expert's weights that the busiest rank sends.

Run it with `python -m benchmarks.bench_ultraep`; `--tokens 512` for a quick look.
"""

import argparse
from dataclasses import replace

import numpy as np

from benchmarks.popular_ranks import CASES, TOKENS_PER_RANK, Case, counts
from benchmarks.timing import interleaved_s, summary
from jax_moe_lb import Plan, Relay, Split, Topology, _planning, imbalance, load, nearest_first, plain_plan, traffic

PUBLISHED = "| mean, published | | 1.03 | 45 | 6.8 | 96.0 | 98.4 |"
PROPORTIONAL = Split("proportional")
EXPERT_BYTES = 37.7e6
"""Of Qwen3-235B in bfloat16; 710 GB/s per rank fit the times that the authors measured without relays."""

BYTES_PER_S = 710e9


def planned(case: Case, loads: np.ndarray) -> tuple[Plan, Plan]:
    """Before and after."""
    slots = case.num_experts // case.num_ranks + case.replica_slots
    before = plain_plan(loads, Topology.flat(case.num_ranks), slots)
    # The paper's floor of 1024 tokens, for 8192 tokens on a rank.
    min_tokens = max(1, loads.sum() // case.num_ranks // 64)
    after = _planning.ultraep(before.placement, before.quota, case.num_ranks, min_tokens=min_tokens)
    return before, Plan(*after, domain=case.num_ranks, split=PROPORTIONAL)


def largest_pair(plan: Plan, loads: np.ndarray) -> int:
    """Rows from one rank to another, of the two that exchange most."""
    ranks = range(plan.num_ranks)
    rows = np.stack([nearest_first(loads, plan.quota, rank, plan.domain, plan.split).sum(0) for rank in ranks])
    return (rows * ~np.eye(plan.num_ranks, dtype=bool)).max()


def fewest_sent(plan: Plan) -> int:
    """Copies that the busiest rank sends at least: each replicated expert leaves home once, and all share the rest."""
    replicas = plan.placement[:, plan.num_home :]
    experts = np.unique(replicas[replicas >= 0])
    at_home = np.bincount(experts // plan.num_home, minlength=plan.num_ranks).max()
    return max(at_home, -(-(replicas >= 0).sum() // plan.num_ranks))


def movement(shape: str, plan: Plan, loads: np.ndarray) -> str:
    """A line of the second table."""
    pairs = [largest_pair(replace(plan, split=split), loads) for split in (Split(), PROPORTIONAL)]
    relayed = Relay().plan(plan)
    home = plan.placement // plan.num_home
    forwarded = np.unique(plan.placement[(plan.placement >= 0) & (relayed.relay != home)])
    fan_out, sent = (traffic(one, loads).fan_out.max() for one in (plan, relayed))
    times = [f"{1e3 * copies * EXPERT_BYTES / BYTES_PER_S:.3f}" for copies in (fan_out, sent)]
    numbers = (*pairs, fan_out, sent, fewest_sent(plan), len(forwarded), *times)
    return f"| {shape} | " + " | ".join(map(str, numbers)) + " |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS_PER_RANK, help="tokens on each rank")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(
        "| experts, ranks, replica slots | before | after | replicas | of one expert | remote rows % "
        "| without locality | planning us |"
    )
    print("|---|---|---|---|---|---|---|---|")
    rows, moved = [], []
    for case in CASES:
        loads = counts(case, args.seed, args.tokens)
        before, after = planned(case, loads)
        copies = np.bincount(after.placement[:, after.num_home :].reshape(-1) + 1, minlength=case.num_experts + 1)[1:]
        anywhere = replace(after, split=Split("proportional", locality=False))
        remote, without = (100 * traffic(plan, loads).rows / loads.sum() for plan in (after, anywhere))
        results = (imbalance(load(after)), copies.sum(), copies.max(), remote, without)
        time_s = interleaved_s({"plan": lambda case=case, loads=loads: planned(case, loads)}, 30)["plan"]
        rows.append(results)
        shape = f"{case.num_experts}, {case.num_ranks}, {case.replica_slots}"
        columns = (
            f"{results[0]:.3f} | {results[1]} | {results[2]} | {remote:.1f} | {without:.1f} | {summary(time_s, 1e6, 0)}"
        )
        print(f"| {shape} | {imbalance(load(before)):.2f} | {columns} |")
        moved.append(movement(f"{shape}, {imbalance(load(before)):.2f}", after, loads))
    mean = np.mean(rows, axis=0)
    print(f"| mean | | {mean[0]:.3f} | {mean[1]:.1f} | {mean[2]:.1f} | {mean[3]:.1f} | {mean[4]:.1f} | |")
    print(PUBLISHED + " 111 (on a GPU) |")
    print()
    print(
        "| experts, ranks, replica slots, before | rows of the largest pair, nearest | proportional "
        "| copies sent from home | with relays | at least | experts with relays | ms at 710 GB/s | with relays |"
    )
    print("|---|---|---|---|---|---|---|---|---|", *moved, sep="\n")


if __name__ == "__main__":
    main()
