"""Targets are parsed from text, and missing compilers are reported."""

import itertools
from dataclasses import dataclass

import pytest

from jax_moe_lb.aot import Target
from jax_moe_lb.aot.targets import GPUS, TPUS

GOOD = {
    "h100:1x8": ("cuda", "h100", (1, 1, 8), 1, (), 8),
    "h100:2x8": ("cuda", "h100", (2, 1, 8), 2, (), 16),
    "h200:8x2x4": ("cuda", "h200", (8, 2, 4), 8, (), 64),
    "gb200:1x18x4": ("cuda", "gb200", (1, 18, 4), 1, (), 72),
    "v5e:2x4": ("tpu", "v5e", (2, 4), 1, (2, 4), 8),
    "v5p:2x2x2": ("tpu", "v5p", (2, 2, 2), 1, (2, 2, 2), 8),
    # A chip has two devices.
    "tpu7x:2x2x1": ("tpu", "tpu7x", (2, 2, 1), 1, (2, 2, 1, 2), 8),
    "v5e:2x4:3": ("tpu", "v5e", (2, 4), 3, (2, 4), 24),
}
"""Platform, device, shape, domains, torus and number of devices."""

BAD = ["", "h100:1x8\n", "h100:\u0661x8", "h100:1x99999999999999999999"]
BAD += [f"h100{rest}" for rest in ("", ":", ":8", ":0x8", ":axb", ":1x8x", ":-1x8", ":1x2x3x4", ":9999x9999", ":1x8:2")]
BAD += ["x100:1x8", "x100:8", "H100:1x8", "v5e", "v5e:2", "tpu:2x2", "v5e:2x4:", "v5e:2x4:0", "v5e:2x4:2:2"]
BAD += ["v5e:16x16:99"]


@pytest.mark.parametrize("text", GOOD)
def test_good_targets(text):
    target = Target.parse(text)
    found = (target.platform, target.kind, target.shape, target.num_domains, target.torus, target.num_devices)
    assert found == GOOD[text]
    assert target.name == text
    assert target.device is (GPUS | TPUS)[target.kind]
    assert target.topology().num_ranks == target.num_devices


def test_a_tpu_of_which_the_compiler_alone_knows_has_a_topology():
    target = Target.parse("v4:2x2")
    assert (target.topology().num_ranks, target.topology().device_kind, target.device) == (4, None, None)


@pytest.mark.parametrize("text", BAD)
def test_bad_targets_are_refused_with_what_was_expected(text):
    expected = "expected NAME:NODESxGPUS .* h100, .* h100:1x8, .* v5e:2x4:2$"
    with pytest.raises(ValueError, match=f"^target is .*; {expected}"):
        Target.parse(text)


@dataclass(frozen=True)
class Device:
    """The attributes of a device of JAX that name its place."""

    device_kind: str
    coords: tuple[int, ...] = ()
    process_index: int = 0
    slice_index: int = 0


def slice_of(kind, shape, per_chip=1, number=0):
    places = itertools.product(*map(range, shape))
    return [Device(kind, coords, slice_index=number) for coords in places for _ in range(per_chip)]


@pytest.mark.parametrize(
    ("devices", "name"),
    [
        (slice_of("TPU v5 lite", (2, 4, 1)), "v5e:2x4"),
        (slice_of("TPU v5", (2, 2, 2)), "v5p:2x2x2"),
        (slice_of("TPU v6 lite", (1, 4, 1)), "v6e:1x4"),
        (slice_of("TPU7x", (2, 2, 1), 2), "tpu7x:2x2"),
        ([chip for i in range(3) for chip in slice_of("TPU v6 lite", (2, 4, 1), 1, i)], "v6e:2x4:3"),
        # Not a box: priced as a line.
        (slice_of("TPU v5 lite", (2, 4, 1))[:-1], "v5e:1x7"),
        ([Device(GPUS["h100"].description)] * 8, "h100:1x1x8"),
        ([Device(GPUS["h100"].description, (), i // 4, i // 8) for i in range(16)], "h100:2x2x4"),
    ],
)
def test_devices_name_their_target(devices, name):
    assert Target.of(devices).name == name


def test_unknown_devices_have_no_target():
    with pytest.raises(ValueError, match="devices are TPU v2; expected one of NVIDIA A100"):
        Target.of([Device("TPU v2", (0, 0, 0))])


@pytest.mark.parametrize("name", GPUS)
def test_what_xla_is_told_is_what_is_known(name):
    gpu, config = GPUS[name], GPUS[name].config()
    assert f"major: {gpu.compute_capability}" in config
    assert f"device_memory_size: {gpu.memory_bytes}\n" in config
    assert config.count("{") == config.count("}")
    # Between the data sheet's size and 15 % less, in units of 10^9.
    sheet = {"a100": 80, "h100": 80, "h200": 141, "b200": 192, "gb200": 192}[name] * 1e9
    assert 0.85 * sheet < gpu.memory_bytes < 1.1 * sheet
