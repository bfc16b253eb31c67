"""Layers of other projects against ours: forward and backward on 8 virtual devices of one process, interleaved.

    python -m benchmarks.bench_peers [--maxtext] [--quick] [--out benchmarks/results/bench_peers.json]

With `--maxtext`, MaxText's block is included (see `benchmarks/peer_maxtext.py` for its installation). Differing tokens
have an output off from the dense layer by more than a thousandth of the largest output: they lost a copy. "Memory" is
the temporary memory planned by XLA for one device.

Two kinds of systems are omitted. Some equal another system on one node (`rails`: `plain`, `two_tier`: `exact` with
relays). Others plan from history (`eplb`, `lplb`), which one microbatch does not have.

Virtual devices share the cores of the machine. These times include computation and copies of all ranks together, but
not the wait for the busiest rank.
"""

import argparse
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.stages import Compiled

from benchmarks.peer_layers import Layer, dense_one_hot, gshard, ours, over_ranks, ragged_dot_ring
from benchmarks.popular_ranks import Case, popularity
from benchmarks.results import Table, Value, out_option, report, spread
from benchmarks.skewed_layer import Sizes, logits_by_popularity, tokens_of, weights_of
from benchmarks.timing import interleaved_s
from jax_moe_lb import Buffers, plain, use_virtual_cpu_devices
from jax_moe_lb.layer.systems import system_named

SIZES = Sizes(num_ranks=8, num_tokens=512, width=256, inner=256, num_experts=32, per_tok=4)
QUICK = Sizes(num_ranks=8, num_tokens=64, width=64, inner=64, num_experts=16, per_tok=2)
SYSTEMS = ("plain", "exact", "greedy", "ultraep", "feplb", "fastermoe", "eplb_plus", "hybridep")
WORST_CASE, DENSE, GSHARD, RAGGED = "plain, worst-case buffer", "dense one-hot", "GShard, capacity 1.25", "ragged_dot"
SKEWS = (1.0, 3.0)
OFF = 1e-3
"""Relative difference above which a token's output counts as different."""


def layers(mesh: Mesh, sizes: Sizes, with_maxtext: bool) -> dict[str, Layer]:
    """Return all layers by name."""
    of_rank = {name: ours(system_named(name), mesh) for name in SYSTEMS}
    of_rank |= {WORST_CASE: ours(plain(Buffers(headroom=float(sizes.num_ranks))), mesh)}
    of_rank |= {GSHARD: gshard, DENSE: dense_one_hot, RAGGED: ragged_dot_ring}
    found = {name: over_ranks(mesh, one, sizes.per_tok) for name, one in of_rank.items()}
    return found | (maxtext_layers(mesh, sizes) if with_maxtext else {})


def maxtext_layers(mesh: Mesh, sizes: Sizes) -> dict[str, Layer]:
    """Return MaxText's layers; MaxText is optional for the other layers."""
    from benchmarks import peer_maxtext
    from benchmarks.peer_maxtext import maxtext_layer

    ways = {"MaxText, capacity 1.25": peer_maxtext.CAPACITY, "MaxText, dense products": peer_maxtext.DENSE}
    return {name: maxtext_layer(sizes, mesh, options) for name, options in ways.items()}


def step_of(layer: Layer):
    """Return `(x, kernel, experts) -> (gradients, y)`."""

    def loss(*args: Any) -> tuple[jax.Array, jax.Array]:
        y = layer(*args)
        return jnp.square(y.astype(jnp.float32)).mean(), y

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))


def arguments(mesh: Mesh, sizes: Sizes, skew: float) -> tuple:
    """Return tokens of an imbalance, kernel and experts."""
    weights = np.ones(sizes.num_experts)
    if skew > 1:
        weights = popularity(Case(sizes.num_experts, sizes.num_ranks, 2, skew), sizes.per_tok)
    return (tokens_of(mesh, sizes, logits_by_popularity(weights, sizes, 0)), *weights_of(mesh, sizes))


def differences(results: Mapping[str, tuple]) -> dict[str, tuple[int, float, float]]:
    """Return the number of tokens differing from the dense layer, and the largest relative differences."""
    want_gradients, want = jax.device_get(results[DENSE])
    largest, found = np.abs(want).max(), {}
    for name, result in results.items():
        gradients, y = jax.device_get(result)
        off = np.abs(y - want).max(1) / largest
        leaves = zip(jax.tree.leaves(gradients), jax.tree.leaves(want_gradients), strict=True)
        of_gradients = max(np.abs(one - other).max() / np.abs(other).max() for one, other in leaves)
        found[name] = int((off > OFF).sum()), float(off.max()), float(of_gradients)
    return found


def measured(steps: Mapping[str, Compiled], args: tuple, repeats: int) -> list[list[Value]]:
    """Return a row for each layer."""
    calls = {name: functools.partial(step, *args) for name, step in steps.items()}
    off = differences({name: call() for name, call in calls.items()})
    times_s = interleaved_s(calls, repeats)
    rows: list[list[Value]] = []
    for name, step in steps.items():
        memory = [of.memory_analysis().temp_size_in_bytes for of in (step, steps["plain"])]
        times = spread(times_s[name] * 1e3), spread(times_s[name] / times_s["plain"])
        rows.append([name, *times, memory[0] / 1e6, memory[0] / memory[1], *off[name]])
    return rows


def claims(rows: Mapping[float, list[list[Value]]]) -> list[list[Value]]:
    """Return the claims about `exact` with the measured results."""
    level, skewed = ({row[0]: row for row in rows[skew]} for skew in SKEWS)
    others = [row for name, row in skewed.items() if name not in SYSTEMS and row[5] == 0]
    nearest = min(others, key=lambda row: row[1][0])
    faster = nearest[1][0] / skewed["exact"][1][0]
    memory, time = skewed["exact"][3] / level["plain"][3], skewed["exact"][1][0] / level["exact"][1][0]
    return [
        ["tokens with different output", "none", f"{skewed['exact'][5]}", _answer(skewed["exact"][5] == 0)],
        ["memory over plain under balanced routing", "1.1 or less", f"{memory:.2f}", _answer(memory <= 1.1)],
        [f"speed over the fastest dropless other, {nearest[0]}", "3 or more", f"{faster:.2f}", _answer(faster >= 3)],
        ["time over exact under balanced routing", "", f"{time:.2f}", ""],
    ]


def _answer(holds: bool) -> str:
    return "met" if holds else "not met"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--maxtext", action="store_true", help="Include MaxText's block; requires MaxText.")
    parser.add_argument("--quick", action="store_true", help="Use a tiny layer.")
    out_option(parser)
    given = parser.parse_args()
    sizes = QUICK if given.quick else SIZES
    use_virtual_cpu_devices(sizes.num_ranks)
    mesh = jax.make_mesh((sizes.num_ranks,), ("expert",), axis_types=(AxisType.Auto,))
    args = {skew: arguments(mesh, sizes, skew) for skew in SKEWS}
    steps = {}
    for name, layer in layers(mesh, sizes, given.maxtext).items():
        steps[name] = step_of(layer).lower(*args[SKEWS[0]]).compile()
        print(f"compiled {name}", flush=True)
    columns = {"layer": "", "step ms": ".0f", "over plain": ".2f", "memory MB": ".1f", "memory over plain": ".2f"}
    columns |= {"tokens with different output": "d", "output error": ".1e", "gradient error": ".1e"}
    rows = {skew: measured(steps, args[skew], 3 if given.quick else 7) for skew in SKEWS}
    tables = {f"skew_{skew:g}": Table(columns, rows[skew]) for skew in SKEWS}
    tables["claims"] = Table({"exact": "", "claim": "", "result": "", "": ""}, claims(rows))
    report(tables, given.out)


if __name__ == "__main__":
    main()
