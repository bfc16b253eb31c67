"""The devices of targets, as their data sheets and their drivers describe them."""

from dataclasses import dataclass


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
