"""Warnings of groups that are no line, plane or box of a torus, and slices with limited routing."""

import warnings
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jax_moe_lb import Topology
from jax_moe_lb.core.torus import has_limited_routing, slice_axes, torus_warning


def chips(*places):
    return [SimpleNamespace(coords=list(place), slice_index=0) for place in places]


@pytest.mark.parametrize(
    "places",
    [
        [(0, 0, 0)],
        [(x, 1, 0) for x in range(4)],
        [(x, y, 0) for x in range(2) for y in range(4)],
        [(x, y, z) for x in range(2) for y in range(2) for z in range(2)],
        # Two devices of each chip.
        [(0, y, 0) for y in range(2) for _ in range(2)],
    ],
)
def test_lines_planes_and_boxes_have_no_warning(places):
    assert torus_warning(chips(*places), ("expert",)) is None


@pytest.mark.parametrize(
    ("places", "cost"),
    [
        ([(0, 0, 0), (1, 1, 0)], "2 chips in a box of 4 .* up to 2 times"),
        ([(x, 0, 0) for x in range(0, 8, 2)], "4 chips in a box of 7 .* up to 1.8 times"),
        ([(0, 0, 0), (0, 1, 0), (1, 0, 0)], "3 chips in a box of 4 .* up to 1.3 times"),
    ],
)
def test_other_groups_have_a_warning_with_their_cost(places, cost):
    found = torus_warning(chips(*places), ("expert",))
    assert found is not None
    assert "\n" not in found
    with pytest.warns(UserWarning, match=cost):
        warnings.warn(found, stacklevel=1)


def mesh_of_slices(shape, slices):
    devices = [SimpleNamespace(platform="tpu", slice_index=number) for number in slices]
    return np.array(devices).reshape(shape)


@pytest.mark.parametrize(
    ("shape", "slices", "axes"),
    [
        ((2, 2, 2), [0, 0, 0, 0, 1, 1, 1, 1], ("a",)),
        ((2, 2, 2), [0, 0, 1, 1, 2, 2, 3, 3], ("a", "b")),
        ((2, 2, 2), [0, 1, 0, 1, 0, 1, 0, 1], ("c",)),
        ((2, 2, 2), [0] * 8, ()),
        ((1, 1, 1), [3], ()),
    ],
)
def test_axes_between_slices(shape, slices, axes):
    assert slice_axes(mesh_of_slices(shape, slices), ("a", "b", "c"), ("a", "b", "c")) == axes
    assert slice_axes(np.array([SimpleNamespace(platform="gpu", slice_index=1)] * 2), ("a",), ("a",)) == ()


def test_gpus_and_several_slices_have_no_warning():
    assert torus_warning([object(), object()], ("expert",)) is None
    two = [SimpleNamespace(coords=(x, x, 0), slice_index=x) for x in range(2)]
    assert torus_warning(two, ("expert",)) is None


def slices(kind, *sizes):
    """Return the first chip of a client whose slices have these numbers of chips."""
    found = [SimpleNamespace(device_kind=kind, slice_index=i) for i, size in enumerate(sizes) for _ in range(size)]
    client = SimpleNamespace(devices=lambda: found)
    return SimpleNamespace(device_kind=kind, slice_index=0, client=client)


@pytest.mark.parametrize(
    ("kind", "sizes", "is_limited"),
    [
        ("TPU v5 lite", (16,), False),
        ("TPU v5 lite", (32,), True),
        ("TPU v5 lite", (16, 16), False),
        ("TPU v5 lite", (64, 64), True),
        ("TPU v6 lite", (64,), False),
        ("TPU v5", (64,), False),
        ("NVIDIA H100", (32,), False),
    ],
)
def test_large_slices_of_v5e_have_limited_routing(kind, sizes, is_limited):
    assert has_limited_routing(slices(kind, *sizes)) is is_limited


def test_the_topology_of_a_mesh_has_limited_routing(monkeypatch):
    mesh = Mesh(np.array(jax.devices()[:4]), ("expert",))
    assert not Topology.from_mesh(mesh).limited_routing
    monkeypatch.setattr("jax_moe_lb.core.topology.has_limited_routing", lambda device: device is mesh.devices[0])
    assert Topology.from_mesh(mesh).limited_routing
    assert not Topology.from_mesh(mesh.abstract_mesh).limited_routing


def test_the_topology_of_a_mesh_warns(monkeypatch):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "expert"))
    asked = []

    def warning(devices, axes):
        asked.append([device.id for device in devices])
        return f"{axes[0]} is bent"

    monkeypatch.setattr("jax_moe_lb.core.topology.torus_warning", warning)
    with pytest.warns(UserWarning, match="expert is bent"):
        Topology.from_mesh(mesh, "expert")
    # The devices of one group.
    assert asked == [[device.id for device in mesh.devices[0]]]
