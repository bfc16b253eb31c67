"""Memory, threads and files of a layer in a long loop on virtual devices; Ctrl-C ends it early."""

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

from benchmarks.reliability.runs import Tables, summary
from benchmarks.render.results import Table, Value

WARM_UP = 200
"""Steps before the first measurement of a soak."""

MOST_GROWTH = 0.01
"""Largest relative growth of the resident memory."""

NUM_DEVICES = 64

TUNABLES = "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=2"
"""Allocator without caches of freed memory for each thread, which grow until every thread has freed every size."""


def without_caches() -> None:
    """Start this command in place of the process, with `TUNABLES`."""
    if os.environ.get("GLIBC_TUNABLES") != TUNABLES:
        command = [sys.executable, "-m", "benchmarks.reliability", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"GLIBC_TUNABLES": TUNABLES})


def resources() -> dict[str, float]:
    """Return resident memory in MB, open file descriptors and threads of this process."""
    status = Path("/proc/self/status").read_text().split("\n")
    fields = dict(line.split(":", 1) for line in status if ":" in line)
    return {
        # Pages of files come and go with the page cache of the system.
        "resident memory without files, MB": int(fields["RssAnon"].split()[0]) * 1024 / 1e6,
        "file descriptors": float(len(os.listdir("/proc/self/fd"))),
        "threads": float(fields["Threads"]),
    }


def soak(given: argparse.Namespace) -> Tables:
    """Run training steps of a layer in one process, and measure its resources every 50 steps."""
    num_steps = given.number or 2000
    without_caches()
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import jax_moe_lb as lb

    lb.use_virtual_cpu_devices(NUM_DEVICES)
    mesh = jax.make_mesh((NUM_DEVICES,), ("expert",))
    experts = lb.ExpertConfig(8)
    layer = lb.MoE(16, 2 * NUM_DEVICES, lb.TopK(2), mesh=mesh, system="exact", experts=experts, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    @jax.jit
    def step(params: nnx.State, key: jax.Array) -> tuple[nnx.State, jax.Array]:
        x = jax.random.normal(key, (NUM_DEVICES * 4, 16)) + 1.0

        def loss(params: nnx.State) -> jax.Array:
            y, stats = nnx.merge(graph, params, rest)(x)
            return jnp.square(y - jnp.roll(x, 1, axis=1)).mean() + lb.router_loss(stats)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    seen: list[dict[str, float]] = []
    with suppress(KeyboardInterrupt):
        for number in range(num_steps):
            params, value = step(params, jax.random.key(number))
            if not np.isfinite(float(value)):
                raise RuntimeError(f"the loss of step {number} is {float(value)}; expected a finite number")
            if number >= WARM_UP and number % 50 == 49:
                seen.append(resources())
                print(f"step {number + 1}: {seen[-1]}", flush=True)
    num_steps = WARM_UP + 50 * len(seen)
    rows: list[list[Value]] = []
    held = 0
    for name, first in seen[0].items():
        last = seen[-1][name]
        most = first * (1 + MOST_GROWTH) if name.startswith("resident") else first
        held += last <= most
        rows.append([name, first, max(one[name] for one in seen), last, most])
    condition = f"memory, file descriptors and threads do not grow after {WARM_UP} steps; memory by at most 1 %"
    note = f"Training steps of a layer on {NUM_DEVICES} virtual devices, with GLIBC_TUNABLES={TUNABLES}."
    columns = {"resource": "", "first": ".1f", "maximum": ".1f", "last": ".1f", "largest last": ".1f"}
    held_steps = num_steps * (held == len(rows))
    found = summary("training steps in one process", num_steps, held_steps, condition, [note])
    return found | {"resources": Table(columns, rows)}
