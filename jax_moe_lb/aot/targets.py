"""Targets of compilation: devices as their data sheets and drivers describe them, and their meshes."""

import importlib.util
import os
import re
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh


@dataclass(frozen=True)
class Gpu:
    """This describes one GPU.

    Args:
        description: its name, as the driver tells it.
        compute_capability: of the architecture, the major number.
        multiprocessors: how many it has.
        clock_ghz: their highest clock.
        memory_bytes: what a program can use.
        l2_bytes: its second-level cache.
        shared_bytes: the shared memory of a multiprocessor.
        bytes_per_s: the bandwidth of its memory.
        flops_per_s: the rate of dense bfloat16 products in its data sheet.
    """

    description: str
    compute_capability: int
    multiprocessors: int
    clock_ghz: float
    memory_bytes: int
    l2_bytes: int
    shared_bytes: int
    bytes_per_s: float
    flops_per_s: float

    def config(self) -> str:
        """Writes the description as XLA reads it, a `GpuTargetConfigProto` in text.

        Versions of cuDNN and the driver are left out: with them XLA plans fusions that compile only beside a GPU.
        """
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
"""By the names that targets have. Memory is what the driver leaves to programs."""


@dataclass(frozen=True)
class Tpu:
    """This describes one TPU chip, of which the compiler knows the rest itself.

    Args:
        memory_bytes: its memory.
        bytes_per_s: the bandwidth of its memory.
        flops_per_s: the rate of dense bfloat16 products in its data sheet.
    """

    memory_bytes: int
    bytes_per_s: float
    flops_per_s: float


TPUS = {
    "v5e": Tpu(16 * 1024 * MIB, 0.819e12, 197e12),
    "v5p": Tpu(95 * 1024 * MIB, 2.765e12, 459e12),
    "v6e": Tpu(32 * 1024 * MIB, 1.64e12, 918e12),
}
"""By the names that targets have. Others can be compiled for, too."""

TEXT = re.compile(r"(\w+):(\d{1,4}(?:x\d{1,4}){1,2})", re.ASCII)
TPU_KIND = re.compile(r"(v|tpu)\d+\w*", re.ASCII)
EXPECTED = (
    f"NAME:NODESxGPUS or NAME:NODESxPROCESSESxGPUS with one of {', '.join(GPUS)}, such as h100:1x8, "
    "or a TPU slice such as v5e:2x4"
)
MOST_DEVICES = 4096

EXTRAS = {"cuda": ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"), "tpu": ("libtpu",)}
"""The modules of which one brings a platform's compiler, by the extra that installs it."""

TPU_FAST_SPACES = frozenset({1, 2, 3, 4})
"""What is no HBM: vector memory, scalar memory and semaphores."""

GPU_FAST_SPACES = frozenset({5})
"""What is no HBM: memory of the host."""


@dataclass(frozen=True)
class Target:
    """A target is a machine that programs are compiled for; it need not be there.

    Args:
        name: what it was parsed from, such as `h100:2x8`.
        platform: JAX's name of it, `cuda` or `tpu`.
        kind: the device, such as `h100`.
        shape: of GPUs NVLink domains, processes of a domain and GPUs of a process; of TPUs the slice.

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

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Reads a target that a user named.

        Args:
            text: `h100:1x8` is one NVLink domain of 8 GPUs, `h100:2x8` two of them, `gb200:1x18x4` one domain of 18
                processes with 4 GPUs each. A TPU slice is called as JAX calls it, such as `v5e:2x4`.

        Raises:
            ValueError: it is no such text.

        Examples:
            >>> from jax_moe_lb.aot import Target
            >>> Target.parse("gb200:1x18x4").shape
            (1, 18, 4)
        """
        found = TEXT.fullmatch(text)
        shape = tuple(map(int, found[2].split("x"))) if found else ()
        if found is None or 0 in shape or np.prod(shape) > MOST_DEVICES:
            raise ValueError(f"target is {text[:100]!r}; expected {EXPECTED}")
        if found[1] in GPUS:
            return cls(text, "cuda", found[1], (shape[0], 1, shape[1]) if len(shape) == 2 else shape)
        if TPU_KIND.fullmatch(found[1]):
            return cls(text, "tpu", found[1], shape)
        raise ValueError(f"target is {text[:100]!r}; expected {EXPECTED}")

    @property
    def num_domains(self) -> int:
        """Counts the domains inside which devices reach each other fastest: NVLink domains; a TPU slice is one."""
        return self.shape[0] if self.platform == "cuda" else 1

    @property
    def device(self) -> Gpu | Tpu | None:
        """Describes one of its devices, `None` if only the compiler knows them."""
        return GPUS.get(self.kind) if self.platform == "cuda" else TPUS.get(self.kind)

    @property
    def fast_spaces(self) -> frozenset[int]:
        """Names the memories that are not the device's own, by XLA's numbers."""
        return GPU_FAST_SPACES if self.platform == "cuda" else TPU_FAST_SPACES

    def require_compiler(self) -> None:
        """Refuses to go on where the compiler of the platform is not installed.

        Raises:
            ValueError: it is not; the message names the extra that brings it.
        """
        if not has_compiler(self.platform):
            raise ValueError(
                f"target {self.name} requires the compiler of {self.platform}; {how_to_install(self.platform)}"
            )

    def devices(self) -> list[jax.Device]:
        """Makes the devices: arrays cannot be placed on them, but programs can be compiled for them.

        Raises:
            ValueError: the compiler of the platform is not installed, or knows no such slice.
        """
        self.require_compiler()
        try:
            return list(self._description().devices)
        except (RuntimeError, NotImplementedError) as error:
            raise ValueError(f"target is {self.name!r}; expected a machine that its compiler knows: {error}") from error

    def _description(self) -> topologies.TopologyDescription:
        if self.platform == "tpu":
            return topologies.get_topology_desc(platform="tpu", topology_name=self.name)
        gpu, shape = GPUS[self.kind], "x".join(map(str, self.shape))
        return topologies.get_topology_desc(
            platform="cuda", topology_name=self.kind, target_config=gpu.config(), topology=shape
        )

    def mesh(self) -> Mesh:
        """Makes a mesh of all devices for one expert-parallel group: axes `node` and `expert`, or `expert` alone."""
        devices = np.array(self.devices())
        if self.num_domains > 1:
            return _auto_mesh(devices.reshape(self.num_domains, -1), ("node", "expert"))
        return _auto_mesh(devices, ("expert",))


def _auto_mesh(devices: np.ndarray, names: tuple[str, ...]) -> Mesh:
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def use_no_accelerators() -> None:
    """Has this process look for no accelerator, so that compilers can be used without one; call it before all else.

    It sets what the plugins of JAX read when they start, in this process alone.

    Examples:
        >>> from jax_moe_lb.aot import use_no_accelerators
        >>> use_no_accelerators()  # doctest: +SKIP
    """
    # The plugin of CUDA would look for CUDA's libraries and a driver, and that of TPUs would ask the network for its
    # slice, and refuse to be loaded by two processes at once. They take no other word for it.
    for name in ("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
        os.environ.setdefault(name, "1")
    jax.config.update("jax_platforms", "cpu")
    # What was compiled before is not compiled, and reports nothing.
    jax.config.update("jax_enable_compilation_cache", False)


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra of this package, which is on no package index."""
    return f"run pip install '.[{extra}]' in a checkout"


def has_compiler(platform: str) -> bool:
    """Says whether the compiler of a platform is installed, `cuda` or `tpu`."""
    return any(map(_is_installed, EXTRAS[platform]))


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
