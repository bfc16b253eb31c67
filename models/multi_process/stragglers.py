"""Detection of straggler hosts, for which all other hosts of a run wait.

The step time cannot identify them, as collectives make it equal on all hosts. Instead, two local times are compared:
the Python work between two steps (`host_s`), and a small matrix product on the first device (`probe_s`). The latter
increases if another program uses the device, or if it is throttled by heat.
"""

import socket
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

EVERY_STEPS = 10  # steps between comparisons of hosts
SLOW = 1.5  # ratio to the median above which a host is a straggler
LEAST_SHARE = 0.05  # minimum excess over the median to report, as a fraction of the step time
PROBE_SIZES = {"cpu": 512}
# Size of the probe matrices on accelerators; with `PROBE_SIZES` on CPUs, the product takes milliseconds.
PROBE_SIZE = 4096
PROBE_REPEATS = 3
NAME_BYTES = 64


class StragglerMonitor:
    """Timer of the local work of this host, compared between hosts every few steps."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self.names = _host_names()
        self.host_s, self.steps, self.began = 0.0, 0, time.perf_counter()
        self.suspects: set[tuple[str, int]] = set()

    def ready(self) -> None:
        """Record the end of the host's part of a step, after which it waits for its devices."""
        self.host_s += time.perf_counter() - self.began
        self.steps += 1

    def stepped(self, step: int, step_time_s: float) -> dict | None:
        """Record the end of a step on the devices; return a row of `metrics.jsonl`, or `None` without a comparison."""
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
                f"the median is {_median(seconds) * 1e3:.3g} ms"
            )
        self.suspects = slow


def straggler_hosts(seconds: np.ndarray, least_s: float) -> list[int]:
    """Return the hosts that take much longer than the median."""
    median = _median(seconds)
    return np.flatnonzero((seconds > SLOW * median) & (seconds - median > least_s)).tolist()


def _median(seconds: np.ndarray) -> float:
    """Return the lower median; with two hosts, the mean of both would hide a straggler."""
    return float(np.quantile(seconds, 0.5, method="lower"))


def _host_names() -> list[str]:
    """Return the names of all hosts, by process index."""
    name = socket.gethostname().encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
    if jax.process_count() == 1:
        return [name.rstrip(b"\0").decode()]
    names = np.asarray(multihost_utils.process_allgather(np.frombuffer(name, np.uint8)))
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in names]


def _probe_s() -> float:
    """Return the duration of a matrix product on the first device of this host, the minimum of a few runs."""
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
