"""Checks of planners on a GPU: their plans equal those of C++ on the host, and a failure leaves no trace."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.findings import Finding, Scale
from jax_moe_lb import Balancer, Topology
from jax_moe_lb.balancers import FEPLB, EPLBPlus, Exact, FasterMoE, Greedy, RailS, UltraEP
from jax_moe_lb.core import plain_plan
from jax_moe_lb.planners.greedy import greedy

PLANNERS: dict[str, Balancer] = {
    "exact": Exact(),
    "exact-eps-0": Exact(eps=0.0, localize=False),
    "exact-fan-out": Exact(max_fan_out=3),
    "greedy": Greedy(2),
    "ultraep": UltraEP(min_tokens=4),
    "feplb": FEPLB(num_dynamic=2),
    "eplb_plus": EPLBPlus(),
    "fastermoe": FasterMoE(expert_bytes=1.0, gradient_bytes=1.0, token_bytes=1.0, token_flops=1.0),
    "rails": RailS(),
}
SIZES = ((8, 8, 128, 20), (16, 8, 64, 6), (32, 32, 256, 10), (64, 64, 256, 6))
"""Ranks, ranks per domain, experts and slots."""


def random_counts(ranks: int, experts: int, number: int) -> Iterator[np.ndarray]:
    """Yield counts `[R, E]` from even to one hot expert."""
    for seed in range(number):
        rng = np.random.default_rng(seed)
        share = rng.dirichlet(np.full(experts, 10.0 ** rng.uniform(-2, 1)))
        yield rng.multinomial(rng.integers(0, 4096), share, size=ranks).astype(np.int32)


def plans_equal_host(name: str, scale: Scale) -> Finding:
    """Check one planner against its NumPy form."""
    balancer, number = PLANNERS[name], scale.of(200, 3)
    for ranks, domain, experts, slots in scale.of(SIZES, ((8, 4, 16, 4),)):
        topology = Topology.flat(ranks, domain)

        def rebalance(counts: jax.Array, topology: Topology = topology, slots: int = slots) -> object:
            start = plain_plan(counts, topology, slots)
            return balancer.rebalance(counts, start, topology, balancer.init(counts.shape))[0]

        program, cases = jax.jit(rebalance), list(random_counts(ranks, experts, number))
        # All calls are queued before the first is read, so that rings of pinned memory and events wrap around.
        for counts, got in zip(cases, [program(jnp.asarray(one)) for one in cases], strict=True):
            want = rebalance(counts)  # type: ignore[arg-type]
            jax.tree.map(np.testing.assert_array_equal, got, want)
    return Finding(True, f"{number} counts of each size")


def failed_plan_is_marked(scale: Scale) -> Finding:
    """Check that invalid counts give -1 throughout, and that the next plan is correct."""
    if jax.default_backend() != "gpu":
        return Finding(None, "the custom call stops the program on a CPU")
    placement = jnp.full((8, 4), -1, jnp.int32).at[:, :2].set(jnp.arange(16, dtype=jnp.int32).reshape(8, 2))
    quota = jnp.zeros((16, 8), jnp.int32).at[jnp.arange(16), jnp.arange(16) // 2].set(jnp.arange(16) ** 2)
    run = jax.jit(lambda placement, quota: greedy(placement, quota, 8, 2))
    for _ in range(100):
        bad = run(placement, quota.at[2, 1].set(-3))
        assert all((np.asarray(part) == -1).all() for part in bad), "an entry of a failed plan is not -1"
    want = greedy(np.asarray(placement), np.asarray(quota), 8, 2)
    jax.tree.map(np.testing.assert_array_equal, run(placement, quota), want)
    return Finding(True, "100 failed plans, then a correct one")
