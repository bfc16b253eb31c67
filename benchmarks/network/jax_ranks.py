"""Ranks as JAX processes on CPUs, connected by gloo."""

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

# Import everything before forking; imports do not start a backend.
import flax.nnx  # noqa: F401
import jax
import jax.experimental.multihost_utils as multihost_utils
import numpy as np

import jax_moe_lb.nn  # noqa: F401
from benchmarks.network.launch import Body, Rank, launch
from benchmarks.network.network import Network
from jax_moe_lb import use_virtual_cpu_devices

PORT = 9911
COLLECTIVE_TIMEOUT_S = 60
"""Timeout of a rank inside a collective; the default is half an hour."""


def launch_jax(
    network: Network,
    body: Body,
    *,
    devices_per_process: int,
    deadline_s: float,
    prepare: Callable[[Rank], None] = lambda rank: None,
    heartbeat_s: int = 10,
) -> list[Any]:
    """Run `launch` with each rank as a JAX process with `devices_per_process` virtual devices."""

    def one_rank(rank: Rank) -> Any:
        prepare(rank)
        _join(rank, devices_per_process, heartbeat_s)
        result = body(rank)
        jax.distributed.shutdown()
        return result

    return launch(network, one_rank, deadline_s=deadline_s)


def _join(rank: Rank, devices_per_process: int, heartbeat_s: int) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        del os.environ[name]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_collective_timeout_seconds={COLLECTIVE_TIMEOUT_S}"
    os.environ["XLA_FLAGS"] = flags.strip()
    jax.config.update("jax_platforms", "cpu")
    use_virtual_cpu_devices(devices_per_process)
    address, limits = f"{rank.hosts[0].address}:{PORT}", {"initialization_timeout": 60, "shutdown_timeout_seconds": 5}
    limits |= {"heartbeat_timeout_seconds": heartbeat_s}
    jax.distributed.initialize(address, len(rank.hosts), rank.index, **limits)


def check_same_program(lowered_text: str) -> None:
    """Check that all ranks are about to run the same program; different programs can return wrong values silently."""
    digest = np.frombuffer(hashlib.sha256(lowered_text.encode()).digest()[:4], np.int32)
    digests = multihost_utils.process_allgather(digest).reshape(-1)
    if (digests != digests[0]).any():
        raise RuntimeError(f"ranks are about to run different programs; their digests are {digests.tolist()}")


def barrier(name: str) -> None:
    """Wait for all ranks."""
    multihost_utils.sync_global_devices(name)


Timed = tuple[list[float], list[list[int]]]
"""Seconds of steps, and on rank 0 the bytes sent by each side of a counted link in each."""


def timed_at(
    rank: Rank, step: Any, args: tuple, rates: Sequence[float | None], repeats: int, label: str
) -> dict[float | None, Timed]:
    """Compile a step, the same on all ranks, and time it with every rate of the links, which rank 0 sets."""
    lowered = step.lower(*args)
    check_same_program(lowered.as_text())
    program = lowered.compile()
    timed_step(rank, program, args)
    found: dict[float | None, Timed] = {rate: ([], []) for rate in rates}
    # In turns: a change of the speed of the machine then changes all rates.
    for rate in [*rates] * repeats:
        if rank.index == 0:
            rank.network.set_rate(rate)
        for kept, value in zip(found[rate], timed_step(rank, program, args), strict=True):
            kept.append(value)
    if rank.index == 0:
        rank.network.set_rate(None)
        print(label, flush=True)
    return found


def timed_step(rank: Rank, program: Callable[..., Any], args: tuple) -> tuple[float, list[int]]:
    """Return the seconds of one step, and on rank 0 the bytes sent by each side of a counted link."""
    barrier("throttled")
    before = rank.network.counters() if rank.index == 0 else ()
    barrier("counted")
    start_s = time.perf_counter()
    jax.block_until_ready(program(*args))
    seconds = time.perf_counter() - start_s
    barrier("done")
    after = rank.network.counters() if rank.index == 0 else ()
    return seconds, [end.sent_bytes - start.sent_bytes for start, end in zip(before, after, strict=True)]
