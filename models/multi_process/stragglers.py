"""`StragglerMonitor` compares the hosts of a run, of which all wait for the slowest, and names it.

The time of a step says nothing about that: it is the same on all hosts, since they exchange rows in it. What each of
them does alone is timed instead: what its Python does between two steps (`host_s`), and a small product on its first
device (`probe_s`), which takes longer where something else uses that device, or where it is hot.
"""

import socket
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

EVERY_STEPS = 10
"""Hosts are compared every so many steps."""

SLOW = 1.5
"""A host is slow which takes so many times as long as the median."""

LEAST_SHARE = 0.05
"""Less than this share of a step is not worth a line."""

PROBE_SIZES = {"cpu": 512}
PROBE_SIZE = 4096
"""The product takes milliseconds: a CPU has a smaller one."""

PROBE_REPEATS = 3
NAME_BYTES = 64


class StragglerMonitor:
    """`StragglerMonitor` times what this host does alone, and compares hosts every few steps.

    Args:
        tell: is called with a line about a host that is slow twice in a row.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self.names = _host_names()
        self.host_s, self.steps, self.began = 0.0, 0, time.perf_counter()
        self.suspects: set[tuple[str, int]] = set()

    def ready(self) -> None:
        """Says that the host has done its part of a step, and waits for the devices from now on."""
        self.host_s += time.perf_counter() - self.began
        self.steps += 1

    def stepped(self, step: int, step_time_s: float) -> dict | None:
        """Says that the devices are done; returns a line of `metrics.jsonl`, or `None` if nothing was compared.

        Args:
            step: the number of the step, which is the same on all hosts, and all of them must ask.
            step_time_s: the seconds that it took.
        """
        row = None
        if len(self.names) > 1 and step % EVERY_STEPS == 0:
            mine = np.asarray([self.host_s / max(self.steps, 1), _probe_s()], np.float32)
            host_s, probe_s = np.asarray(multihost_utils.process_allgather(mine), np.float64).T
            row = {"kind": "hosts", "step": step, "host_s": host_s.tolist(), "probe_s": probe_s.tolist()}
            slow = {("between steps", host) for host in straggler_hosts(host_s, LEAST_SHARE * step_time_s)}
            slow |= {("for the same product", host) for host in straggler_hosts(probe_s, 0.0)}
            self._name(step, slow, {"between steps": host_s, "for the same product": probe_s})
            self.host_s, self.steps = 0.0, 0
        self.began = time.perf_counter()
        return row

    def _name(self, step: int, slow: set[tuple[str, int]], times: dict[str, np.ndarray]) -> None:
        for what, host in sorted(slow & self.suspects):
            seconds = times[what]
            self.tell(
                f"step {step}: process {host} on {self.names[host]} is slow: {seconds[host] * 1e3:.3g} ms {what}, "
                f"where the median is {_median(seconds) * 1e3:.3g} ms"
            )
        self.suspects = slow


def straggler_hosts(seconds: np.ndarray, least_s: float) -> list[int]:
    """Find the hosts that take much longer than the median.

    Args:
        seconds: `[hosts]`, what each of them took for its part.
        least_s: a difference of fewer seconds is none.
    """
    median = _median(seconds)
    return np.flatnonzero((seconds > SLOW * median) & (seconds - median > least_s)).tolist()


def _median(seconds: np.ndarray) -> float:
    """Take the lower one of two: of two hosts none could be slow otherwise."""
    return float(np.quantile(seconds, 0.5, method="lower"))


def _host_names() -> list[str]:
    """Collect the names of all hosts, by process."""
    name = socket.gethostname().encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
    if jax.process_count() == 1:
        return [name.rstrip(b"\0").decode()]
    names = np.asarray(multihost_utils.process_allgather(np.frombuffer(name, np.uint8)))
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in names]


def _probe_s() -> float:
    """Times a product on the first device of this host, the best of a few."""
    device = jax.local_devices()[0]
    size = PROBE_SIZES.get(device.platform, PROBE_SIZE)
    x = jax.device_put(jnp.ones((size, size), jnp.float32), device)
    best = float("inf")
    for _ in range(PROBE_REPEATS + 1):
        began = time.perf_counter()
        _product(x).block_until_ready()
        best = min(best, time.perf_counter() - began)
    return best


@jax.jit
def _product(x: jax.Array) -> jax.Array:
    return x @ x
