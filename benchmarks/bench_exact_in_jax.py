"""Plan quality of `Exact` in jnp against the C++ planner, on the same loads.

    python -m benchmarks.bench_exact_in_jax --loads FILE.npy ... [--step 4] [--shape 8 2]

A row is one shape, one `eps` and one bound on the fan-out. It gives max/mean load of each planner, the excess of jnp
(mean and worst layer, in percent), and the replicas per layer. With `eps`, either planner may use all of it to save
replicas, so a difference up to `eps` is no loss. All ranks form one domain; `localize` is off, as it changes neither
number.
"""

import argparse
import itertools
from collections.abc import Iterator

import jax
import numpy as np

from benchmarks import recorded
from benchmarks.results import Table, Value, out_option, report
from jax_moe_lb import _planning
from jax_moe_lb.planners.exact_search import exact_in_jax

SHAPES = ((8, 1), (8, 2), (16, 1), (16, 2), (32, 1), (32, 2), (64, 1), (64, 2))
"""Ranks, and replica slots per rank."""
ANY = 2**63 - 1
BINDING = 3
"""Fan-out bound below that of unbounded plans: 2 to 14 on recorded loads, mostly 4 to 8."""

RUN = jax.jit(exact_in_jax, static_argnums=(1, 2, 3, 4, 5))

Plan = tuple[np.ndarray, np.ndarray]


def found(plan: Plan, tokens: np.ndarray) -> tuple[float, int]:
    """Return max/mean load, and replicas."""
    placement, quota = map(np.asarray, plan)
    return quota.sum(0).max() * quota.shape[1] / tokens.sum(dtype=np.int64), int((placement >= 0).sum()) - len(tokens)


def both(layers: np.ndarray, num_ranks: int, spare: int, eps: float, fan_out: int) -> Iterator[tuple[float, ...]]:
    """Yield the results of C++ and of jnp for each layer."""
    for tokens in layers:
        counts = recorded.on_first_rank(tokens, num_ranks)
        options = (len(tokens) // num_ranks + spare, num_ranks, eps, fan_out, False)
        yield *found(_planning.exact(counts, *options), tokens), *found(RUN(counts, *options), tokens)


def main() -> None:
    """Report the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recorded.add_arguments(parser)
    parser.add_argument(
        "--shape", type=int, nargs=2, action="append", metavar=("RANKS", "SLOTS"), help="One shape; all by default."
    )
    out_option(parser)
    options = parser.parse_args()
    layers = np.concatenate(list(recorded.read(options).values()))
    lines: list[list[Value]] = []
    ways = itertools.product(options.shape or SHAPES, (ANY, BINDING), (0.0, 0.01))
    for (num_ranks, spare), fan_out, eps in ways:
        rows = np.array(list(both(layers, num_ranks, spare, eps, fan_out)))
        theirs, their_number, ours, our_number = rows.T
        above = 100 * (ours / theirs - 1)
        levels = theirs.mean(), ours.mean(), above.mean(), above.max()
        replicas = their_number.mean(), our_number.mean()
        bound = "any" if fan_out == ANY else str(fan_out)
        lines.append([num_ranks, spare, eps, bound, *map(float, (*levels, *replicas))])
    columns = {"ranks": "d", "S - L": "d", "eps": "", "max_fan_out": "", "C++": ".5f", "jnp": ".5f"}
    columns |= {"mean, %": "+.3f", "worst, %": "+.2f", "replicas, C++": ".1f", "replicas, jnp": ".1f"}
    report({"planners": Table(columns, lines, f"{len(layers)} layers of {layers.shape[1]} experts")}, options.out)


if __name__ == "__main__":
    main()
