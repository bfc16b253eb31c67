"""`Communication` says what the library that moves bytes does: by which algorithms, in which numbers, once or often."""

from dataclasses import dataclass
from enum import StrEnum

MOST_BYTES = 8.0
"""A number of a token has at most so many bytes: those of float64."""


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
        by_level: whether tokens go level by level, as DeepEP sends them: to their offset in another node, and from
            there inside it; else straight to their rank.
        once_per_member: whether a token with several experts in one member of a level, a node or a rank, is sent there
            once, and what its experts put out is summed before it returns. Only where it goes level by level.
        dispatch_bytes: the bytes of a number of a token on its way to experts, or of its gradient; `None`: the model's.
            1.03 is fp8 with a scale in float32 for every 128.
        combine_bytes: likewise of what returns; 2 where only the dispatch is in fp8.
        shares_links: whether exchanges that overlap share the links; else one waits for the other, as XLA's collectives
            do on their one stream.

    Raises:
        ValueError: a number is out of range, or tokens that go straight are to be sent once.

    Examples:
        >>> from jax_moe_lb.sim import Cluster, Collective, Communication, Links
        >>> told_directly = Communication(collectives=Collective.DIRECT)
        >>> Cluster((Links("gpu", 8, 360e9),), communication=told_directly).communication.by_pairs
        False
    """

    collectives: Collective = Collective.RING
    by_pairs: bool = False
    by_level: bool = False
    once_per_member: bool = False
    dispatch_bytes: float | None = None
    combine_bytes: float | None = None
    shares_links: bool = False

    def __post_init__(self) -> None:
        if self.once_per_member and not self.by_level:
            raise ValueError("once_per_member is True; expected by_level as well, as copies are made where it arrives")
        for name in ("dispatch_bytes", "combine_bytes"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= MOST_BYTES:
                raise ValueError(f"{name} is {value}; expected more than 0 and at most {MOST_BYTES}, or None")
