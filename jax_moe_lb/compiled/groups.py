"""Over which axes of the mesh a collective goes, from the groups of devices that it names."""

import itertools
import re
from collections.abc import Mapping

import numpy as np

from jax_moe_lb.compiled.hlo import Instruction

LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
NUMBERED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^{}:]*)\}")

Groups = frozenset[frozenset[int]]


def axes_of(instruction: Instruction, axes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Names the mesh axes that a collective goes over: none if every device is alone, `None` if no axes match.

    Args:
        instruction: a collective.
        axes: names and sizes of the mesh, outermost first; devices are numbered row-major.
    """
    attributes = instruction.attributes
    if "source_target_pairs" in attributes:
        return _axes_of_pairs(_listed(attributes), axes)
    groups = _listed(attributes) or _numbered(attributes) or _named(attributes)
    # No groups at all are one, of all devices.
    everyone = "replica_groups={}" in attributes or "replica_groups=" not in attributes
    return tuple(axes) if everyone else _axes_of_groups(frozenset(map(frozenset, groups)), axes)


def _listed(attributes: str) -> list[tuple[int, ...]]:
    found = LISTED.search(attributes)
    groups = re.findall(r"\{([\d,]+)\}", found[1]) if found else []
    return [tuple(map(int, group.split(","))) for group in groups]


def _numbered(attributes: str) -> list[tuple[int, ...]]:
    """Reads `[2,8]<=[8,2]T(1,0)`: devices counted up, transposed, and cut into groups."""
    found = NUMBERED.search(attributes)
    if found is None:
        return []
    shape, sizes = ([int(size) for size in part.split(",")] for part in (found[1], found[2]))
    order = [int(axis) for axis in found[3].split(",")] if found[3] else list(range(len(sizes)))
    devices = np.arange(np.prod(sizes)).reshape(sizes).transpose(order)
    return [tuple(group) for group in devices.reshape(shape[0], -1).tolist()]


def _named(attributes: str) -> list[tuple[int, ...]]:
    """Reads `mesh['a'=2,'b'=8] {'b'}`, groups over axes of a mesh of XLA's own, whose names may be others."""
    found = NAMED.search(attributes)
    if found is None:
        return []
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
    chosen = [list(sizes).index(name) for name in re.findall(r"'([^']+)'", found[2])]
    devices = np.arange(np.prod(list(sizes.values()), dtype=int)).reshape(tuple(sizes.values()))
    return [tuple(group) for group in _groups_over(devices, tuple(chosen)).tolist()]


def _groups_over(devices: np.ndarray, chosen: tuple[int, ...]) -> np.ndarray:
    """Cuts devices into groups of those that differ only along the chosen axes."""
    last = np.moveaxis(devices, chosen, range(devices.ndim - len(chosen), devices.ndim))
    return last.reshape(-1, int(np.prod([devices.shape[axis] for axis in chosen], dtype=int)))


def _axes_of_groups(groups: Groups, axes: Mapping[str, int]) -> tuple[str, ...] | None:
    names = list(axes)
    devices = np.arange(np.prod(list(axes.values()), dtype=int)).reshape(tuple(axes.values()))
    for size in range(len(names) + 1):
        for chosen in itertools.combinations(range(len(names)), size):
            if frozenset(map(frozenset, _groups_over(devices, chosen).tolist())) == groups:
                return tuple(names[axis] for axis in chosen)
    return None


def _axes_of_pairs(pairs: list[tuple[int, ...]], axes: Mapping[str, int]) -> tuple[str, ...]:
    """Names the axes along which a sender differs from its receiver."""
    places = [np.array(np.unravel_index(pair, tuple(axes.values()))) for pair in pairs]
    moved = {axis for place in places for axis in np.flatnonzero(place[:, 0] != place[:, 1])}
    return tuple(name for axis, name in enumerate(axes) if axis in moved)
