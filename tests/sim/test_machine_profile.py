"""Measurements of `calibrate` become a file, with warnings for implausible values."""

from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

from jax_moe_lb.sim import measure as calibrate
from jax_moe_lb.sim.config import load_config
from jax_moe_lb.sim.machine_profile import Measured, MeasuredExchange, to_yaml, warnings

NODE, GPU = MeasuredExchange("node", 2, 45e9, 2e-5), MeasuredExchange("gpu", 8, 300e9, 4e-6)
SOUND = Measured(
    machine="node, 16 x NVIDIA H100 80GB HBM3",
    platform="gpu",
    date="2026-01-31",
    busy=0.3,
    cores=64,
    ranks=16,
    exchanges=(NODE, GPU),
    rows=(1.0, 1024.0),
    flops_per_s=(1e12, 500e12),
    dense_flops_per_s=500e12,
    copy_bytes_per_s=300e9,
    planner_s=50e-6,
    hbm_bytes_per_s=3e12,
    memory_bytes=80_000_000_000,
)


def test_nothing_is_said_of_sound_figures():
    assert list(warnings(SOUND)) == []
    assert "Warning" not in to_yaml(SOUND, 256, 512)


def test_figures_far_from_the_preset_are_named():
    slow = replace(SOUND, exchanges=(NODE, replace(GPU, bytes_per_s=60e9)))
    assert list(warnings(slow)) == ["the rate of level gpu is 6e+10 B/s, 4.5 times below the 2.7e+11 of h100_node"]
    assert "# Warning: the rate of level gpu is" in to_yaml(slow, 256, 512)
    # There is no reference for a device without a preset.
    assert list(warnings(replace(slow, machine="cpu-H100, 16 x Another", platform="tpu"))) == []


def test_load_is_named():
    (line,) = warnings(replace(SOUND, busy=40.0))
    assert "load average was 40.0 on 64 cores" in line


def read_back(tmp_path, measured):
    (tmp_path / "m.yaml").write_text(to_yaml(measured, 256, 512))
    return load_config("CONFIG", str(tmp_path / "m.yaml")).cluster.build()


def test_every_level_is_written(tmp_path):
    cluster = read_back(tmp_path, SOUND)
    levels = [(one.name, one.size, one.links, one.bytes_per_s) for one in cluster.levels]
    assert levels == [("node", 2, 8, 45e9), ("gpu", 8, 1, 300e9)]
    assert (cluster.memory_bytes, cluster.hbm_bytes_per_s) == (80e9, 3e12)
    assert (cluster.backward_factor, cluster.communication.padded, cluster.joins_weights) == (3.0, False, False)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_the_backward_pass_padded_exchanges_and_joined_weights_are_written(platform, tmp_path):
    cluster = read_back(tmp_path, replace(SOUND, backward_factor=2.5, padded=True, platform=platform))
    assert (cluster.backward_factor, cluster.communication.padded, cluster.joins_weights) == (2.5, True, True)


@dataclass(frozen=True)
class Device:
    """Minimal device with the location attributes."""

    id: int
    process_index: int
    slice_index: int | None = None
    platform: str = "gpu"


@pytest.mark.parametrize(
    ("platform", "slices", "expected"),
    [
        # Eight processes with one GPU each: a node is a slice.
        ("gpu", 2, (2, 4)),
        ("gpu", 1, (1, 8)),
        # CPUs have links between processes only.
        ("cpu", 2, (8, 1)),
    ],
)
def test_nodes_are_those_that_jax_can_see(platform, slices, expected):
    devices = [Device(at, at, at * slices // 8, platform) for at in range(8)]
    assert calibrate.by_node(devices).shape == expected


def test_nodes_have_equally_many_devices():
    devices = [Device(at, 0, int(at > 2)) for at in range(8)]
    with pytest.raises(ValueError, match="nodes have 3 and 5 devices; expected equally many in all of them"):
        calibrate.by_node(devices)


def test_a_machine_of_one_device_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [Device(0, 0)])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match=r"the machine has one device, Device\(.*\); expected at least 2, as one rank"):
        calibrate.measure(2)


@pytest.mark.slow
def test_each_level_is_exchanged_alone(monkeypatch):
    for name, value in {"HIDDEN": 8, "MANY_ROWS": 64, "REPEATS": 1}.items():
        monkeypatch.setattr(calibrate, name, value)
    grid = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = jax.sharding.Mesh(grid, ("node", "gpu"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    found = [calibrate._exchange(mesh, level) for level in mesh.axis_names]
    assert [(one.level, one.size) for one in found] == [("node", 2), ("gpu", 2)]
    assert all(one.bytes_per_s > 0 and one.latency_s > 0 for one in found)
