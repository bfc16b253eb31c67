"""Implementation of an exchange by target: the table of paths.

XLA chooses the path of `ragged_all_to_all` on NVIDIA GPUs when it compiles and runs a program. This table predicts its
choice from the topology, so that lists have the form that the path runs fastest.

Sources: `ragged_all_to_all.cc` and the flags of jaxlib 0.12.0.1; openxla/xla#33386 and #47283 (one-shot kernel), #46982
(sends and receives), #47868 (device kernel).
"""

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jax_moe_lb.collectives.one_shot_lists import MAX_ONE_SHOT_RANKS
from jax_moe_lb.core.custom_calls import is_built
from jax_moe_lb.core.device_rates import GpuRates, device_rates
from jax_moe_lb.core.topology import Topology

HBM_BYTES_PER_S = 3.35e12
"""Memory bandwidth of an H100, from the data sheet; later GPUs have more."""

FIRST_DEVICE_KERNEL = (0, 12)
"""First version of jaxlib with the device kernel."""


class ExchangePath(enum.Enum):
    """Implementation of an exchange of rows."""

    ONE_SHOT = "one-shot kernel"
    """One kernel of XLA, which writes to the memory of all ranks: GPUs of one process."""
    DEVICE_KERNEL = "NCCL device kernel"
    """One kernel of XLA on NCCL's symmetric memory: one GPU per process, all in one NVLink domain."""
    SEND_RECEIVE = "NCCL sends and receives"
    """One send and one receive of NCCL or RCCL per update; the host waits for the lists."""
    GATHER = "gather of the only rank"
    NATIVE = "ragged_all_to_all of the TPU"
    HOSTS = "transfers through the hosts of TPU slices"
    """Rows of all ranks travel through their hosts, also between ranks of one slice."""
    CUSTOM_CALL = "custom call in one process"
    STEPS = "padded steps of other collectives"
    UNKNOWN = "unknown until the mesh is known"


@dataclass(frozen=True)
class PathChoice:
    """Path of the exchanges of a topology."""

    path: ExchangePath  # the implementation
    reason: str  # condition of the choice

    @property
    def costs_per_update(self) -> bool:
        """Whether an update has a cost of its own, so that one slice per rank is fastest."""
        return self.path in (ExchangePath.DEVICE_KERNEL, ExchangePath.SEND_RECEIVE)

    def fastest(self, forms: Sequence[tuple[int, int]]) -> int:
        """Return the index of the form of an exchange estimated to be fastest."""
        if self.path is ExchangePath.STEPS:
            # Forms begin with one exchange per array; the next one has all arrays in one exchange, and so the latencies
            # once. Later forms have larger operands, of which a step sends a fixed part.
            return min(1, len(forms) - 1)
        if not self.costs_per_update:
            return 0
        # The device kernel requires operands copied into symmetric memory, and this copy can arrange them.
        if self.path is ExchangePath.DEVICE_KERNEL:
            return min(range(len(forms)), key=lambda i: forms[i][::-1])
        update_s = _update_s()
        # A copy reads and writes.
        seconds = [2 * copied_bytes / HBM_BYTES_PER_S + updates * update_s for copied_bytes, updates in forms]
        return seconds.index(min(seconds))


@functools.cache
def _update_s() -> float:
    """Return the seconds of a send and a receive of NCCL, also of an empty update."""
    rates = device_rates("h100", "cuda")
    assert isinstance(rates, GpuRates)
    return rates.nccl_update


def exchange_path(topology: Topology) -> PathChoice:
    """Return the path of an exchange over all expert axes of a topology."""
    platform, ranks = topology.platform, topology.num_ranks
    if platform is None:
        return PathChoice(ExchangePath.UNKNOWN, "the topology is not read from a mesh of devices")
    if topology.limited_routing:
        return PathChoice(ExchangePath.STEPS, "a slice of TPU v5e with more than 16 chips has limited routing")
    if topology.crosses_slices:
        return PathChoice(ExchangePath.HOSTS, "the ranks are of several TPU slices")
    if platform == "tpu":
        return PathChoice(ExchangePath.NATIVE, "TPUs have one implementation")
    if platform == "cpu":
        return _on_cpus(topology)
    if platform == "rocm":
        return _on_rocm(topology)
    if ranks == 1:
        return PathChoice(ExchangePath.GATHER, "one rank")
    if topology.in_one_process:
        if ranks <= MAX_ONE_SHOT_RANKS:
            return PathChoice(ExchangePath.ONE_SHOT, f"{ranks} ranks are devices of one process")
        return PathChoice(ExchangePath.SEND_RECEIVE, f"{ranks} ranks; the one-shot kernel has {MAX_ONE_SHOT_RANKS}")
    if not topology.processes:
        return PathChoice(ExchangePath.SEND_RECEIVE, "several processes, with several devices each")
    if topology.ranks_per_domain < ranks:
        return PathChoice(ExchangePath.SEND_RECEIVE, f"{topology.num_domains} domains; the device kernel needs one")
    if jax.__version_info__ < FIRST_DEVICE_KERNEL:
        first = ".".join(map(str, FIRST_DEVICE_KERNEL))
        return PathChoice(ExchangePath.SEND_RECEIVE, f"jax {jax.__version__}; the device kernel needs {first}")
    return PathChoice(ExchangePath.DEVICE_KERNEL, "one device per process, in one domain")


def _on_rocm(topology: Topology) -> PathChoice:
    if topology.in_one_process:
        # AMD's maxtext-slurm turns it off and reports a third of the step time.
        reason = "devices of one process; its lists are filled on NVIDIA GPUs only"
        return PathChoice(ExchangePath.ONE_SHOT, reason)
    return PathChoice(ExchangePath.SEND_RECEIVE, "several processes; the device kernel is NCCL's")


def _on_cpus(topology: Topology) -> PathChoice:
    if not is_built("cpu"):
        return PathChoice(ExchangePath.STEPS, "the custom calls are not built")
    if not topology.in_one_process:
        return PathChoice(ExchangePath.STEPS, "several processes")
    return PathChoice(ExchangePath.CUSTOM_CALL, "all ranks are devices of one process")
