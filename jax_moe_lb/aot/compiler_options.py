"""XLA compiler options for programs with balanced layers on GPUs."""

from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from jax_moe_lb.collectives.exchange_paths import FIRST_DEVICE_KERNEL
from jax_moe_lb.collectives.one_shot_lists import MAX_ONE_SHOT_RANKS

IN_GRAPHS = (
    "FUSION",
    "CUBLAS",
    "CUBLASLT",
    "CUSTOM_CALL",
    "CUDNN",
    "DYNAMIC_SLICE_FUSION",
    "CONDITIONAL",
    "WHILE",
    "COLLECTIVES",
)
"""Operations in command buffers. A loop needs all of the operations in this list, so it includes XLA's defaults."""


COMMAND_BUFFER = "xla_gpu_enable_command_buffer"
MULTI_HOST_DECOMPOSER = "xla_gpu_unsupported_enable_ragged_all_to_all_multi_host_decomposer"
SYMMETRIC_BUFFERS = "xla_gpu_experimental_enable_nccl_symmetric_buffers"
DEVICE_KERNEL = "xla_gpu_experimental_ragged_all_to_all_use_device_kernel"
SEND_RECEIVE = "xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback"
ONE_SHOT = "xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel"
ZERO_COPY = "xla_gpu_experimental_ragged_all_to_all_zero_copy"
LATENCY_HIDING = "xla_gpu_enable_latency_hiding_scheduler"


def compiler_options(mesh: Mesh, others: Mapping[str, str | bool] | None = None) -> dict[str, str | bool]:
    """Return options for `jax.jit(..., compiler_options=...)` of a program with balanced layers on NVIDIA GPUs.

    An option applies to this program alone, unlike a flag in `XLA_FLAGS`. `docs/how-to/gpu.md` lists the effect of each
    option on the compiled program.

    Args:
        mesh: mesh of the program's devices. With several NVLink domains or processes, the options keep the ragged
            exchanges; XLA otherwise replaces them by all-gathers of all token copies.
        others: options of your own, by their names without dashes. They take precedence.

    Returns:
        The options; `others` alone for devices other than NVIDIA GPUs.

    Raises:
        ValueError: `others` combine options known to give wrong results or to have no effect.

    Examples:
        >>> import jax
        >>> from jax.sharding import AxisType
        >>> from jax_moe_lb import compiler_options
        >>> mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> step = jax.jit(lambda x: 2 * x, compiler_options=compiler_options(mesh))
        >>> compiler_options(mesh)  # on CPUs
        {}
    """
    devices, given = mesh.devices.flat, dict(others or {})
    if devices[0].platform not in ("gpu", "cuda"):
        return given
    # A command buffer runs as a CUDA graph: the host does not wait before each round of a loop.
    options: dict[str, str | bool] = {COMMAND_BUFFER: ",".join(IN_GRAPHS)}
    processes = {(device.process_index, getattr(device, "slice_index", 0)) for device in devices}
    if len(processes) > 1:
        # The decomposer gathers the copies of all domains on every rank.
        options |= {MULTI_HOST_DECOMPOSER: False}
        if jax.__version_info__ >= FIRST_DEVICE_KERNEL:
            # NCCL's symmetric memory may be absent: then sends and receives, for which the host waits.
            options |= {SEND_RECEIVE: True}
            if len(processes) == len(devices):
                # Operands of an exchange, home weights too, are copied into symmetric memory. Only the device kernel
                # reads it there, and it requires one device per process.
                options |= {DEVICE_KERNEL: True, SYMMETRIC_BUFFERS: True}
    elif len(devices) > MAX_ONE_SHOT_RANKS:
        options |= {ONE_SHOT: False, SEND_RECEIVE: True}
    options |= given
    _check(options, len(devices) if len(processes) == 1 else 0)
    return options


def _check(options: Mapping[str, str | bool], ranks_in_process: int) -> None:
    def is_on(name: str) -> bool:
        return str(options.get(name, False)).lower() in ("true", "1")

    if is_on(ZERO_COPY) and is_on(LATENCY_HIDING):
        raise ValueError(
            f"{ZERO_COPY} and {LATENCY_HIDING} are on; expected one of them: together they give NaN gradients "
            "(marin-community/marin#8077)"
        )
    if is_on(DEVICE_KERNEL) and not is_on(SYMMETRIC_BUFFERS):
        raise ValueError(
            f"{DEVICE_KERNEL} is on and {SYMMETRIC_BUFFERS} off; expected both: "
            "without symmetric input the device kernel is not used"
        )
    if is_on(ONE_SHOT) and ranks_in_process > MAX_ONE_SHOT_RANKS:
        raise ValueError(
            f"{ONE_SHOT} is on for {ranks_in_process} devices of one process; expected at most {MAX_ONE_SHOT_RANKS} "
            "(openxla/xla#47283)"
        )
