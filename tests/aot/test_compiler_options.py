from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jax_moe_lb import compiler_options
from tests.layer_cases import make_mesh

LATENCY_HIDING = "xla_gpu_enable_latency_hiding_scheduler"
SYMMETRIC = "xla_gpu_experimental_enable_nccl_symmetric_buffers"
ZERO_COPY = "xla_gpu_experimental_ragged_all_to_all_zero_copy"
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


def test_other_options_take_precedence():
    assert compiler_options(gpus(0, 1), {BETWEEN_DOMAINS: True})[BETWEEN_DOMAINS] is True
    assert compiler_options(make_mesh((8,), ("expert",)), {"xla_dump_to": "x"}) == {"xla_dump_to": "x"}


@pytest.mark.parametrize(("mesh", "is_on"), [(gpus(0, 1), True), (gpus(0, 0, 1, 1), False)], ids=["one", "two"])
def test_operands_are_copied_to_symmetric_memory_only_for_the_device_kernel(mesh, is_on, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    options = compiler_options(mesh)
    assert (SYMMETRIC in options) == is_on
    assert ("xla_gpu_experimental_ragged_all_to_all_use_device_kernel" in options) == is_on
    assert options["xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback"]


def test_more_ranks_than_the_one_shot_kernel_has_do_not_use_it():
    one_shot = "xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel"
    assert one_shot not in compiler_options(gpus(*[0] * 32))
    assert compiler_options(gpus(*[0] * 33))[one_shot] is False
    with pytest.raises(ValueError, match=r"is on for 33 devices of one process; expected at most 32"):
        compiler_options(gpus(*[0] * 33), {one_shot: True})


@pytest.mark.parametrize(
    ("mesh", "others", "message"),
    [
        (gpus(0, 0), {ZERO_COPY: True, LATENCY_HIDING: "true"}, "they give NaN gradients"),
        (gpus(0, 1), {SYMMETRIC: False}, "without symmetric input the device kernel is not used"),
    ],
)
def test_known_bad_combinations_are_refused(mesh, others, message, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    with pytest.raises(ValueError, match=message):
        compiler_options(mesh, others)
