from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
from jax.sharding import Mesh

from jax_moe_lb import Topology
from jax_moe_lb.collectives import exchange_paths
from jax_moe_lb.collectives.exchange_paths import ExchangePath, exchange_path
from tests.layer_cases import make_mesh

GPUS = replace(Topology.flat(8), platform="cuda", ranks_per_process=8)
APART = replace(GPUS, ranks_per_process=1, processes=tuple(range(8)))


@pytest.mark.parametrize(
    ("topology", "path", "reason"),
    [
        (Topology.flat(8), ExchangePath.UNKNOWN, "not read from a mesh"),
        (GPUS, ExchangePath.ONE_SHOT, "one process"),
        (replace(Topology.flat(64), platform="cuda", ranks_per_process=64), ExchangePath.SEND_RECEIVE, "has 32"),
        (replace(Topology.flat(1), platform="cuda", ranks_per_process=1), ExchangePath.GATHER, "one rank"),
        (APART, ExchangePath.DEVICE_KERNEL, "one device per process"),
        (replace(APART, ranks_per_domain=4), ExchangePath.SEND_RECEIVE, "2 domains"),
        (replace(GPUS, ranks_per_process=4), ExchangePath.SEND_RECEIVE, "several devices each"),
        (replace(GPUS, platform="rocm"), ExchangePath.ONE_SHOT, "filled on NVIDIA GPUs only"),
        (replace(APART, platform="rocm"), ExchangePath.SEND_RECEIVE, "the device kernel is NCCL's"),
        (replace(Topology.flat(8), platform="tpu", ranks_per_process=4), ExchangePath.NATIVE, "TPUs"),
        (replace(Topology.flat(32), platform="tpu", limited_routing=True), ExchangePath.STEPS, "limited routing"),
        (
            replace(Topology.flat(8), platform="tpu", expert_axes=("slice",), slice_axes=("slice",)),
            ExchangePath.HOSTS,
            "several TPU slices",
        ),
    ],
)
def test_each_target_has_its_path_and_a_reason(topology, path, reason, monkeypatch):
    monkeypatch.setattr(exchange_paths.jax, "__version_info__", (0, 12, 0))
    choice = exchange_path(topology)
    assert choice.path is path
    assert reason in choice.reason


def test_an_older_jaxlib_has_no_device_kernel(monkeypatch):
    monkeypatch.setattr(exchange_paths.jax, "__version_info__", (0, 11, 9))
    assert exchange_path(APART).path is ExchangePath.SEND_RECEIVE


@dataclass(frozen=True, eq=False)
class Gpu:
    client: SimpleNamespace
    platform: str = "gpu"
    process_index: int = 0
    device_kind: str = "a GPU"


@pytest.mark.parametrize(("version", "platform"), [("rocm 70200", "rocm"), ("PJRT C API\ncuda 13000", "cuda")])
def test_the_platform_of_a_gpu_is_that_of_its_driver(version, platform):
    devices = np.array([Gpu(SimpleNamespace(platform_version=version))])
    assert Topology.from_mesh(Mesh(devices, ("expert",))).platform == platform


def test_virtual_devices_exchange_by_a_custom_call_if_built(monkeypatch):
    topology = Topology.from_mesh(make_mesh((8,), ("expert",)))
    monkeypatch.setattr(exchange_paths, "is_built", lambda platform: True)
    assert exchange_path(topology).path is ExchangePath.CUSTOM_CALL
    monkeypatch.setattr(exchange_paths, "is_built", lambda platform: False)
    assert exchange_path(topology).path is ExchangePath.STEPS


SEND_RECEIVE = replace(GPUS, ranks_per_process=4)


@pytest.mark.parametrize(
    ("topology", "ranks", "expert_bytes", "num_home", "room", "form"),
    [
        # Experts of 3 arrays, 2 replicas a rank: Qwen3-30B-A3B on 16 ranks, DeepSeek-V3 on 64 and on 16. A rank sends
        # up to 14 replicas in a domain of 8.
        (SEND_RECEIVE, 16, 9_437_184, 8, 14, 2),
        (SEND_RECEIVE, 64, 88_080_384, 4, None, 1),
        (SEND_RECEIVE, 16, 88_080_384, 16, 14, 2),
        (SEND_RECEIVE, 16, 88_080_384, 16, None, 0),
        # The operands are copied in any case.
        (APART, 16, 88_080_384, 16, 14, 2),
        (APART, 16, 88_080_384, 16, None, 1),
        (GPUS, 8, 9_437_184, 16, 14, 0),
        # Between processes on CPUs an array has latencies of its own, and steps are parts of the operand.
        (replace(SEND_RECEIVE, platform="cpu"), 16, 9_437_184, 8, 14, 1),
    ],
    ids=[
        "Qwen3",
        "DeepSeek-V3",
        "by rank",
        "many home experts",
        "device kernel",
        "large domain",
        "one process",
        "CPUs",
    ],
)
def test_copies_are_weighed_against_updates(topology, ranks, expert_bytes, num_home, room, form, monkeypatch):
    """One exchange per array, one for all arrays, or one slice per rank."""
    monkeypatch.setattr(exchange_paths.jax, "__version_info__", (0, 12, 0))
    peers = ranks - 1
    forms = [(0, 3 * 2 * peers), ((num_home + 2) * expert_bytes, 2 * peers)]
    forms += [] if room is None else [((room + 2) * expert_bytes, peers)]
    assert exchange_path(topology).fastest(forms) == form
