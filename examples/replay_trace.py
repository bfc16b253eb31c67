"""Replay a routing trace with drifting hot experts under two systems."""

import tempfile
from pathlib import Path

import jax
import numpy as np

from jax_moe_lb import Balancer, Topology
from jax_moe_lb.balancers import Greedy, Plain
from jax_moe_lb.core import check_plan, imbalance, load, plain_plan, straggler, traffic

NUM_STEPS, NUM_LAYERS, NUM_RANKS, NUM_EXPERTS, COPIES_PER_RANK = 8, 2, 8, 32, 4096


def write_trace(path: Path) -> None:
    """Write synthetic counts of randomly drifting expert popularities, in the format of `jax-moe-lb replay`."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 0.8, (NUM_LAYERS, NUM_EXPERTS))
    steps = []
    for _ in range(NUM_STEPS):
        logits += rng.normal(0, 0.3, logits.shape)
        popularity = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        steps.append([rng.multinomial(COPIES_PER_RANK, layer, size=NUM_RANKS) for layer in popularity])
    np.savez(path, counts=np.array(steps, np.int32), steps=np.arange(NUM_STEPS))


def replay(balancer: Balancer, counts: np.ndarray, topology: Topology, slots: int) -> np.ndarray:
    """Return imbalance, straggler in copies and replicas per step, averaged over layers, `[steps, 3]`."""
    rebalance = jax.jit(lambda *args: balancer.rebalance(*args[:2], topology, args[2]))
    states = [balancer.init(counts.shape[-2:])] * counts.shape[1]
    rows = []
    for step in counts:
        effects = []
        for layer, layer_counts in enumerate(step):
            plan, states[layer] = rebalance(layer_counts, plain_plan(layer_counts, topology, slots), states[layer])
            check_plan(plan, layer_counts)
            after = load(plan)
            effects.append((imbalance(after), straggler(after), traffic(plan, layer_counts).replicas))
        rows.append(np.mean(np.array(effects, float), axis=0))
    return np.stack(rows)


def main() -> None:
    """Print both systems side by side."""
    with tempfile.TemporaryDirectory() as folder:
        write_trace(Path(folder) / "trace.npz")
        with np.load(Path(folder) / "trace.npz") as trace:
            steps, counts = trace["steps"], trace["counts"]
    topology = Topology.flat(NUM_RANKS)
    plain, greedy = (replay(balancer, counts, topology, slots=6) for balancer in (Plain(), Greedy()))
    print("      imbalance        straggler        replicas\nstep  plain  greedy    plain  greedy      greedy")
    for step, x, y in zip([*steps, "mean"], [*plain, plain.mean(0)], [*greedy, greedy.mean(0)], strict=True):
        print(f"{step!s:4}  {x[0]:5.3f}  {y[0]:6.3f}  {x[1]:7.1f}  {y[1]:6.1f}  {y[2]:10.1f}")


if __name__ == "__main__":
    main()
