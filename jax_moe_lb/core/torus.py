"""Chips of TPU slices: the place of an expert-parallel group in the torus, limited routing, and several slices."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

# A slice of TPU v5e with more chips has limited routing between them, and its compiler refuses ragged exchanges.
FREELY_ROUTED_CHIPS = 16


def has_limited_routing(device: Any) -> bool:
    """Return whether a device is a chip of a slice with limited routing; False for devices without a client."""
    if getattr(device, "device_kind", None) != "TPU v5 lite" or not hasattr(device, "client"):
        return False
    slices = [getattr(one, "slice_index", None) for one in device.client.devices()]
    return slices.count(getattr(device, "slice_index", None)) > FREELY_ROUTED_CHIPS


def slice_axes(devices: np.ndarray, names: tuple[str, ...], axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes of a mesh along which the chips are of several TPU slices."""
    if devices.flat[0].platform != "tpu":
        return ()
    number = np.vectorize(lambda device: getattr(device, "slice_index", 0), otypes=[int])(devices)
    return tuple(axis for axis in axes if (np.diff(number, axis=names.index(axis)) != 0).any())


def torus_warning(devices: Sequence[Any], axes: tuple[str, ...]) -> str | None:
    """Return a warning if the chips of a group are no line, plane or box of one torus; `None` for other devices."""
    # Several slices have a torus each, and the network between them.
    if len({getattr(device, "slice_index", 0) for device in devices}) > 1 or not hasattr(devices[0], "coords"):
        return None
    places = {tuple(device.coords) for device in devices}
    box = math.prod(max(along) - min(along) + 1 for along in zip(*places, strict=True))
    if box == len(places):
        return None
    return (
        f"mesh axes {', '.join(axes)} have {len(places)} chips in a box of {box} of the torus; expected a line, plane "
        f"or box, as of jax.make_mesh: other groups share its links, and exchanges take up to {box / len(places):.2g} "
        "times as long"
    )
