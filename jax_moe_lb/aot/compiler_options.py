"""XLA compiler options for programs with balanced layers on GPUs."""

import jax
from jax.sharding import Mesh

FIRST_WITH_A_KERNEL = (0, 12)
"""First version with these options. jaxlib 0.10 compiles exchanges to sends and receives only, and rejects unknown
options.
"""

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
"""Operations in command buffers. A loop needs all of its operations in this list, so it includes XLA's defaults."""


def compiler_options(mesh: Mesh) -> dict[str, str | bool]:
    """Return options for the `compiler_options` of `jax.jit`; empty for devices other than NVIDIA GPUs.

    Use it for every program with balanced layers on GPUs. Unlike a flag in the environment, an option applies to this
    program only, and can be overridden in the dictionary. `docs/how-to/gpu.md` shows the effect of each option on the
    compiled program.

    Args:
        mesh: Mesh of the program's devices. If it spans several NVLink domains or processes, the options keep exchanges
            of rows intact. By default, XLA would decompose them into all-gathers of all token copies.

    Returns:
        Option values by XLA's names without dashes.

    Examples:
        >>> import jax
        >>> from jax.sharding import AxisType
        >>> from jax_moe_lb import compiler_options
        >>> mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> step = jax.jit(lambda x: 2 * x, compiler_options=compiler_options(mesh))
        >>> compiler_options(mesh)  # on CPUs
        {}
    """
    devices = mesh.devices.flat
    if devices[0].platform not in ("gpu", "cuda"):
        return {}
    options: dict[str, str | bool] = {
        # CUDA runs a command buffer as a graph, so the host does not wait before each round of a loop.
        "xla_gpu_enable_command_buffer": ",".join(IN_GRAPHS),
    }
    if len({(device.process_index, getattr(device, "slice_index", 0)) for device in devices}) > 1:
        # A decomposed exchange gathers the copies of all domains on every rank. An intact one runs as a kernel on
        # symmetric buffers if NCCL provides them, else as sends and receives, for which the host waits.
        options["xla_gpu_unsupported_enable_ragged_all_to_all_multi_host_decomposer"] = False
        options["xla_gpu_experimental_enable_nccl_symmetric_buffers"] = True
        if jax.__version_info__ >= FIRST_WITH_A_KERNEL:
            options["xla_gpu_experimental_ragged_all_to_all_use_device_kernel"] = True
            options["xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback"] = True
    return options
