"""Meshes of random layers."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Place:
    """Mesh, expert, data and tensor axes, and logical axis rules without those for the expert axes.

    Args:
        domains: ranks of a domain, besides 1 and all.
        rails: rails of a node.
        split: ranks of an expert domain along each axis; empty without a gather of experts.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    expert_axes: tuple[str, ...] = ("expert",)
    tensor_axes: tuple[str, ...] = ()
    data_axes: tuple[str, ...] | None = None
    exp: tuple[str, ...] = ()
    embed: str | None = None
    mlp: str | None = None
    domains: tuple[int, ...] = (2,)
    rails: tuple[int, ...] = (1, 2)
    split: tuple[tuple[str, int], ...] = ()

    @property
    def parts(self) -> int:
        """Number of ranks with experts of their own."""
        sizes = dict(zip(self.names, self.sizes, strict=True))
        return int(np.prod([sizes[axis] for axis in self.expert_axes + self.exp]))

    def rules(self) -> tuple:
        return (("exp", (*self.expert_axes, *self.exp)), ("embed", self.embed), ("mlp", self.mlp))


CUBE = ("fsdp", "expert", "tensor")
NODE, CENTRE = ("node", "gpu"), ("dc", "node", "gpu")
PLACES = [
    Place((1,), ("expert",), domains=(), rails=(1,)),
    Place((2,), ("expert",)),
    Place((4,), ("expert",)),
    Place((8,), ("expert",), domains=(2, 4)),
    Place((2, 2), NODE, NODE),
    Place((2, 4), NODE, NODE, domains=(2, 4), rails=(1, 2, 4)),
    Place((2, 2, 2), CENTRE, CENTRE, domains=(2, 4)),
    Place((2, 2), ("data", "expert"), data_axes=("data",)),
    Place((2, 4), ("data", "expert"), data_axes=("data",)),
    Place((4, 2), ("expert", "data"), data_axes=("data",)),
    Place((2, 2, 2), ("data", *NODE), NODE, data_axes=("data",)),
    Place((2, 2), ("expert", "tensor"), tensor_axes=("tensor",), mlp="tensor"),
    Place((2, 2, 2), ("data", "expert", "tensor"), tensor_axes=("tensor",), data_axes=("data",), mlp="tensor"),
    Place((2, 2, 2), CUBE, tensor_axes=("tensor",), embed="fsdp", mlp="tensor"),
    Place((2, 2, 2), CUBE, tensor_axes=("tensor",), exp=("fsdp",), mlp="tensor"),
    Place((2, 2), ("fsdp", "expert"), embed="fsdp"),
    Place((2, 2), ("fsdp", "expert"), mlp="fsdp"),
    Place((4,), ("expert",), split=(("expert", 2),)),
    Place((8,), ("expert",), split=(("expert", 4),)),
    Place((2, 4), ("data", "expert"), data_axes=("data",), split=(("expert", 2),)),
    Place((2, 4), NODE, NODE, split=(("node", 2), ("gpu", 2))),
    Place((2, 2, 2), CENTRE, CENTRE, domains=(2, 4), split=(("dc", 2), ("node", 1), ("gpu", 1))),
]
