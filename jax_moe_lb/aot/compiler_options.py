"""Options of XLA's compiler that a program with balanced layers should have on GPUs."""

import jax
from jax.sharding import Mesh

FIRST_WITH_A_KERNEL = (0, 12)
"""The compiler of jaxlib 0.10 has sends and receives alone, and refuses options that it does not know."""

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
"""What goes into command buffers. A loop does only if all that is in it may, so the defaults are among them."""


def compiler_options(mesh: Mesh) -> dict[str, str | bool]:
    """Returns options for the `compiler_options` of `jax.jit`; none for other devices than NVIDIA's GPUs.

    Use it for every program on GPUs that has balanced layers. An option holds for this program alone, other than a flag
    in the environment, and can be overridden in the dictionary. `docs/how-to/gpu.md` shows what each of them changes in
    the compiled program.

    Args:
        mesh: of the program's devices. Where they are in several NVLink domains, or in several processes, exchanges of
            rows stay what they are; XLA would make them all-gathers of all token copies otherwise.

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
        # CUDA runs what is in a command buffer as a graph: its host does not wait before each round of a loop.
        "xla_gpu_enable_command_buffer": ",".join(IN_GRAPHS),
    }
    if len({(device.process_index, getattr(device, "slice_index", 0)) for device in devices}) > 1:
        # An exchange that XLA takes apart gathers the copies of all domains on every rank. Whole, it runs as a kernel
        # on buffers that all can reach where NCCL has these, else as sends and receives, for which the host waits.
        options["xla_gpu_unsupported_enable_ragged_all_to_all_multi_host_decomposer"] = False
        options["xla_gpu_experimental_enable_nccl_symmetric_buffers"] = True
        if jax.__version_info__ >= FIRST_WITH_A_KERNEL:
            options["xla_gpu_experimental_ragged_all_to_all_use_device_kernel"] = True
            options["xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback"] = True
    return options
