"""`Communication` says what the library that moves bytes does: by which algorithms, in which numbers, once or often."""

from dataclasses import dataclass
from enum import StrEnum


class Collective(StrEnum):
    """It is how an all-gather, a reduce-scatter or an all-reduce goes; `collectives.py` counts its bytes and hops.

    Examples:
        >>> from jax_moe_lb.sim import Collective
        >>> [str(one) for one in Collective]
        ['ring', 'tree', 'hierarchical', 'direct']
    """

    RING = "ring"
    """One ring of all ranks in their order, as NCCL and Gloo have for what XLA compiles to an all-gather."""

    TREE = "tree"
    """As many hops as the logarithm of each level's size: two binary trees, or doubling."""

    HIERARCHICAL = "hierarchical"
    """A ring of each level, one level after the other, with its shard alone across the outer ones."""

    DIRECT = "direct"
    """Each rank to every other at once, as DeepEP tells counts."""


@dataclass(frozen=True)
class Communication:
    """Describes what moves the bytes of a cluster; the default is what XLA's collectives do on GPUs.

    Give it to a `Cluster` where another library moves them.

    Args:
        collectives: the algorithm of all-gathers, reduce-scatters and all-reduces: of counts, gathered experts and
            their gradients, and the shared expert of a codec.
        by_pairs: whether an exchange of tokens pays a latency for every pair of ranks, one after the other, as in
            MPI's pairwise exchange; else all messages are under way at once.

    Examples:
        >>> from jax_moe_lb.sim import Cluster, Collective, Communication, Links
        >>> told_directly = Communication(collectives=Collective.DIRECT)
        >>> Cluster((Links("gpu", 8, 360e9),), communication=told_directly).communication.by_pairs
        False
    """

    collectives: Collective = Collective.RING
    by_pairs: bool = False
