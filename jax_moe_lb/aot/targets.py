"""Targets of compilation: devices from data sheets and drivers, and their meshes."""

import importlib.util
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from jax_moe_lb.core.topology import Level, Topology


@dataclass(frozen=True)
class Gpu:
    """Description of one GPU."""

    description: str  # name reported by the driver
    compute_capability: int  # major compute capability of the architecture
    multiprocessors: int  # number of multiprocessors
    clock_ghz: float  # maximum clock of the multiprocessors, in GHz
    memory_bytes: int  # memory available to a program, in bytes
    l2_bytes: int  # size of the L2 cache, in bytes
    shared_bytes: int  # shared memory of one multiprocessor, in bytes
    bytes_per_s: float  # memory bandwidth, in bytes per second
    flops_per_s: float  # dense bfloat16 rate from its data sheet, in floating-point operations per second

    def config(self) -> str:
        """Format the description for XLA, as a `GpuTargetConfigProto` in text."""
        # The real versions of cuDNN and the driver are left out: with them, XLA plans fusions that compile only beside
        # a GPU.
        return f"""
gpu_device_info {{
  name: "{self.description}"
  cuda_compute_capability {{ major: {self.compute_capability} }}
  core_count: {self.multiprocessors}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  memory_bandwidth: {int(self.bytes_per_s)}
  l2_cache_size: {self.l2_bytes}
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {self.shared_bytes - 1024}
  shared_memory_per_core: {self.shared_bytes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 13 minor: 0 }}
device_description_str: "{self.description}"
"""


KIB = 2**10
MIB = 2**20
GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 8, 108, 1.41, 81037 * MIB, 40 * MIB, 164 * KIB, 2.039e12, 312e12),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 9, 132, 1.98, 81007 * MIB, 50 * MIB, 228 * KIB, 3.352e12, 989e12),
    "h200": Gpu("NVIDIA H200", 9, 132, 1.98, 144384 * MIB, 50 * MIB, 228 * KIB, 4.8e12, 989e12),
    "b200": Gpu("NVIDIA B200", 10, 148, 1.965, 182642 * MIB, 126 * MIB, 228 * KIB, 7.67e12, 2250e12),
    "gb200": Gpu("NVIDIA GB200", 10, 152, 2.062, 188730 * MIB, 126 * MIB, 228 * KIB, 7.93e12, 2500e12),
}
"""GPUs by name in targets. `memory_bytes` is the memory that the driver leaves to programs."""


@dataclass(frozen=True)
class Tpu:
    """Description of one device of a TPU; its compiler has the other properties."""

    memory_bytes: int  # memory in bytes
    bytes_per_s: float  # memory bandwidth, in bytes per second
    flops_per_s: float  # dense bfloat16 rate from its data sheet, in floating-point operations per second
    descriptions: tuple[str, ...]  # names reported by JAX as `device_kind`
    per_chip: int = 1  # devices of a chip, 1 by default. They share its links.


TPUS = {
    "v5e": Tpu(16 * 1024 * MIB, 0.819e12, 197e12, ("TPU v5 lite", "TPU v5e")),
    "v5p": Tpu(95 * 1024 * MIB, 2.765e12, 459e12, ("TPU v5", "TPU v5p")),
    "v6e": Tpu(32 * 1024 * MIB, 1.64e12, 918e12, ("TPU v6 lite", "TPU v6e")),
    # Half a chip, which is one device of JAX.
    "tpu7x": Tpu(96 * 1024 * MIB, 3.69e12, 1153e12, ("TPU7x", "TPU v7x"), per_chip=2),
}
"""TPUs by name in targets. Other TPUs can be targets, too, without these properties."""

KINDS = {gpu.description: name for name, gpu in GPUS.items()} | {
    description: name for name, tpu in TPUS.items() for description in tpu.descriptions
}
"""Names of devices in targets, by `device_kind` in JAX."""

TEXT = re.compile(r"(\w+):(\d{1,4}(?:x\d{1,4}){1,2})(?::(\d{1,4}))?", re.ASCII)
TPU_KIND = re.compile(r"(v|tpu)\d+\w*", re.ASCII)
EXPECTED = (
    f"NAME:NODESxGPUS or NAME:NODESxPROCESSESxGPUS with one of {', '.join(GPUS)}, such as h100:1x8, "
    "or a TPU slice such as v5e:2x4, or several such as v5e:2x4:2"
)
MOST_DEVICES = 4096

EXTRAS = {"cuda": ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"), "tpu": ("libtpu",)}
"""Alternative modules with a platform's compiler, by the extra that installs one of them."""

TPU_FAST_SPACES = frozenset({1, 2, 3, 4})
"""XLA's memory spaces outside HBM: vector memory, scalar memory and semaphores."""

GPU_FAST_SPACES = frozenset({5})
"""XLA's memory space outside HBM: host memory."""


@dataclass(frozen=True)
class Target:
    """Machine for which programs are compiled; it need not be present.

    Args:
        name: Text of the target, such as `h100:2x8`.
        platform: JAX's name of the platform, `cuda` or `tpu`.
        kind: Device, such as `h100`.
        shape: For GPUs, the numbers of NVLink domains, processes per domain and GPUs per process; for TPUs, the slice.
        num_slices: Number of equal TPU slices, 1 by default.

    Examples:
        >>> from jax_moe_lb.aot import Target
        >>> target = Target.parse("h100:2x8")
        >>> target.platform, target.kind, target.shape, target.num_domains
        ('cuda', 'h100', (2, 1, 8), 2)
    """

    name: str
    platform: str
    kind: str
    shape: tuple[int, ...]
    num_slices: int = 1

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Parse the name of a target.

        Args:
            text: `h100:1x8` is one NVLink domain of 8 GPUs, `h100:2x8` has two domains, and `gb200:1x18x4` is one
                domain of 18 processes with 4 GPUs each. TPU slices have JAX's names, such as `v5e:2x4`, and
                `v5e:2x4:3` is three such slices.

        Returns:
            The target.

        Raises:
            ValueError: The text is no target, or has more than 4096 devices.

        Examples:
            >>> from jax_moe_lb.aot import Target
            >>> Target.parse("gb200:1x18x4").shape
            (1, 18, 4)
        """
        found = TEXT.fullmatch(text)
        shape = tuple(map(int, found[2].split("x"))) if found else ()
        slices = int(found[3] or 1) if found else 0
        if found is None or 0 in (*shape, slices) or math.prod((*shape, slices)) > MOST_DEVICES:
            raise ValueError(f"target is {text[:100]!r}; expected {EXPECTED}")
        if found[1] in GPUS and found[3] is None:
            return cls(text, "cuda", found[1], (shape[0], 1, shape[1]) if len(shape) == 2 else shape)
        if found[1] not in GPUS and TPU_KIND.fullmatch(found[1]):
            return cls(text, "tpu", found[1], shape, slices)
        raise ValueError(f"target is {text[:100]!r}; expected {EXPECTED}")

    @classmethod
    def of(cls, devices: Sequence[Any]) -> "Target":
        """Return the target of existing devices, or of `Target.devices`.

        Args:
            devices: Devices of JAX of one expert-parallel group.

        Raises:
            ValueError: The devices are of no known kind.
        """
        kind = KINDS.get(devices[0].device_kind)
        if kind is None:
            raise ValueError(f"devices are {devices[0].device_kind}; expected one of {', '.join(KINDS)}")
        domains = len({getattr(device, "slice_index", 0) for device in devices})
        if kind in TPUS:
            shape = _extents([device.coords for device in devices], len(devices) // domains // TPUS[kind].per_chip)
        else:
            processes = len({(getattr(device, "slice_index", 0), device.process_index) for device in devices})
            shape = domains, processes // domains, len(devices) // processes
        of_slices = f":{domains}" if kind in TPUS and domains > 1 else ""
        return cls.parse(f"{kind}:{'x'.join(map(str, shape))}{of_slices}")

    @property
    def num_domains(self) -> int:
        """Number of domains with the fastest links inside: NVLink domains of GPUs, or TPU slices."""
        return self.shape[0] if self.platform == "cuda" else self.num_slices

    @property
    def torus(self) -> tuple[int, ...]:
        """Devices along each axis of a TPU slice, with the devices of a chip as last axis; `()` for GPUs."""
        per_chip = TPUS[self.kind].per_chip if self.kind in TPUS else 1
        return () if self.platform == "cuda" else self.shape + (per_chip,) * (per_chip > 1)

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return math.prod(self.torus or self.shape) * self.num_slices

    @property
    def device(self) -> Gpu | Tpu | None:
        """Description of one of the devices; None if only the compiler knows its properties."""
        return GPUS.get(self.kind) if self.platform == "cuda" else TPUS.get(self.kind)

    @property
    def fast_spaces(self) -> frozenset[int]:
        """XLA's numbers of memory spaces outside the device's main memory."""
        return GPU_FAST_SPACES if self.platform == "cuda" else TPU_FAST_SPACES

    def topology(self) -> Topology:
        """Return the topology of all devices as one expert-parallel group, for planning on this host."""
        domains = self.num_domains
        inside = self.num_devices // domains
        levels = (Level("node", domains), Level("gpu", inside)) if domains > 1 else (Level("gpu", inside),)
        device_kind = next((name for name, kind in KINDS.items() if kind == self.kind), None)
        return Topology(levels, inside, rails_per_node=inside, platform=self.platform, device_kind=device_kind)

    def require_compiler(self) -> None:
        """Raise an error if the compiler of the platform is not installed.

        Raises:
            ValueError: The compiler is missing; the message names its extra.
        """
        if not has_compiler(self.platform):
            raise ValueError(
                f"target {self.name} requires the compiler of {self.platform}; {how_to_install(self.platform)}"
            )

    def devices(self) -> list[jax.Device]:
        """Create the devices. They cannot hold arrays, but programs can be compiled for them.

        Raises:
            ValueError: The compiler of the platform is not installed, or does not support the slice.
        """
        self.require_compiler()
        try:
            return list(self._description().devices)
        except (RuntimeError, NotImplementedError) as error:
            raise ValueError(
                f"target is {self.name!r}; expected a machine supported by its compiler: {error}"
            ) from error

    def _description(self) -> topologies.TopologyDescription:
        if self.platform == "tpu":
            several = {"num_slices": self.num_slices} if self.num_slices > 1 else {}
            name = f"{self.kind}:{'x'.join(map(str, self.shape))}"
            return topologies.get_topology_desc(platform="tpu", topology_name=name, **several)
        gpu, shape = GPUS[self.kind], "x".join(map(str, self.shape))
        return topologies.get_topology_desc(
            platform="cuda", topology_name=self.kind, target_config=gpu.config(), topology=shape
        )

    def mesh(self) -> Mesh:
        """Create a mesh of all devices as one expert-parallel group, with axes `node` (if several) and `expert`."""
        devices = np.array(self.devices())
        if self.num_domains > 1:
            return _auto_mesh(devices.reshape(self.num_domains, -1), ("node", "expert"))
        return _auto_mesh(devices, ("expert",))


def _extents(coordinates: Sequence[Sequence[int]], number: int) -> tuple[int, ...]:
    """Return the shape of a slice with `number` chips; a line if they do not fill a box."""
    places = set(map(tuple, coordinates))
    x, y, *others = (max(along) - min(along) + 1 for along in zip(*places, strict=True))
    shape = (x, y, *(size for size in others if size > 1))
    return shape if math.prod(shape) == len(places) == number else (1, number)


def _auto_mesh(devices: np.ndarray, names: tuple[str, ...]) -> Mesh:
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def use_no_accelerators() -> None:
    """Disable the search for accelerators in this process, so that compilers work without a device.

    Call it before any other use of JAX. It sets environment variables of JAX's plugins for this process, selects the
    CPU platform, and disables the compilation cache.

    Examples:
        >>> from jax_moe_lb.aot import use_no_accelerators
        >>> use_no_accelerators()  # doctest: +SKIP
    """
    # CUDA's plugin would look for CUDA's libraries and a driver. The TPU plugin would query the network for its slice,
    # and reject a second process. These variables are the only way to disable both.
    for name in ("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
        os.environ.setdefault(name, "1")
    jax.config.update("jax_platforms", "cpu")
    # A cached program is not compiled, so it has no dumps for the report.
    jax.config.update("jax_enable_compilation_cache", False)


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra of this package, which is on no package index."""
    return f"run pip install '.[{extra}]' in a checkout"


def has_compiler(platform: str) -> bool:
    """Return whether the compiler of a platform, `cuda` or `tpu`, is installed."""
    return any(map(_is_installed, EXTRAS[platform]))


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
