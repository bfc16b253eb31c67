"""Place of an expert-parallel group in the torus of a TPU slice."""

import math
from collections.abc import Sequence
from typing import Any


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
