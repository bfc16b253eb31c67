from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jax_moe_lb import compiler_options
from tests.layer_cases import make_mesh

BETWEEN_DOMAINS = "xla_gpu_unsupported_enable_ragged_all_to_all_multi_host_decomposer"


@dataclass(frozen=True)
class Gpu:
    id: int
    process_index: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100"


def gpus(*processes):
    """Return a mesh with one GPU per given process."""
    return Mesh(np.array([Gpu(id, process) for id, process in enumerate(processes)]), ("expert",))


@pytest.mark.parametrize(("mesh", "between"), [(gpus(0, 0), False), (gpus(0, 1), True)], ids=["one", "two"])
def test_every_option_is_known_to_the_compiler(mesh, between):
    options = compiler_options(mesh)
    assert (BETWEEN_DOMAINS in options) == between
    # The CPU compiler parses the same options, and rejects unknown ones.
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(lambda x: x + 2, compiler_options={**options, "xla_gpu_no_such_option": True})(1)


def test_other_devices_get_none():
    assert compiler_options(make_mesh((8,), ("expert",))) == {}
