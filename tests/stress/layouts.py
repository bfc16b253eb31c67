"""Meshes of the random layer test."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Layout:
    """A mesh, its expert axes, and its split into expert domains for systems with domains."""

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    expert_axes: tuple[str, ...]
    ranks_per_domain: int | None = None
    rails_per_node: int = 1
    split: tuple[tuple[str, int], ...] = ()

    @property
    def num_ranks(self) -> int:
        """Ranks of all expert axes, before any split."""
        sizes = dict(zip(self.names, self.sizes, strict=True))
        return int(np.prod([sizes[axis] for axis in self.expert_axes]))

    @property
    def shards(self) -> int:
        return int(np.prod(self.sizes))

    @property
    def domain_size(self) -> int:
        return int(np.prod([size for _, size in self.split]))


ONE = ("expert",)
LAYOUTS = {
    "one device": Layout((1,), ONE, ONE),
    "2 ranks": Layout((2,), ONE, ONE, split=(("expert", 2),)),
    "4 ranks": Layout((4,), ONE, ONE, split=(("expert", 2),)),
    "8 ranks": Layout((8,), ONE, ONE, split=(("expert", 4),)),
    "8 ranks in domains of 4": Layout((8,), ONE, ONE, 4, split=(("expert", 2),)),
    "data 2 x 2 ranks": Layout((2, 2), ("data", "expert"), ONE),
    "data 2 x 4 ranks": Layout((2, 4), ("data", "expert"), ONE, split=(("expert", 2),)),
    "4 ranks x data 2": Layout((4, 2), ("expert", "data"), ONE),
    "2 nodes of 2": Layout((2, 2), ("node", "gpu"), ("node", "gpu"), None, 2),
    "2 nodes of 4": Layout((2, 4), ("node", "gpu"), ("node", "gpu"), None, 4, (("node", 2), ("gpu", 2))),
    "data 2 x 2 nodes of 2": Layout((2, 2, 2), ("data", "node", "gpu"), ("node", "gpu"), 4, 1),
    "2 centres of 2 nodes of 2": Layout(
        (2, 2, 2), ("dc", "node", "gpu"), ("dc", "node", "gpu"), 4, 2, (("dc", 2), ("node", 1), ("gpu", 1))
    ),
    "data 2 x 2 nodes of 2, replicas inside": Layout((2, 2, 2), ("data", "node", "gpu"), ("node", "gpu")),
    "2 centres of 2 nodes of 2, replicas inside": Layout((2, 2, 2), ("dc", "node", "gpu"), ("dc", "node", "gpu")),
}
NODES = ("2 nodes of 2", "2 nodes of 4", *(name for name in LAYOUTS if name.endswith("replicas inside")))
RAILS = ("2 nodes of 2", "2 nodes of 4", "2 centres of 2 nodes of 2")
SPLIT = tuple(name for name, layout in LAYOUTS.items() if layout.split)
