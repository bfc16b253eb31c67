"""Gathers of experts inside expert domains, and their bytes on links."""

import math
from dataclasses import dataclass, field

from jax_moe_lb.core.checks import checked_fields
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.model import ModelShape
from jax_moe_lb.sim.network import Flow, MessageSizes, all_gather, all_reduce, reduce_scatter
from jax_moe_lb.transport.compression import Codec


@dataclass(frozen=True)
@checked_fields
class Migration:
    """Gathers of experts inside expert domains, before tokens are known, as in HybridEP.

    Pass it to `simulate` to move experts instead of tokens over slow links. The default gathers no experts.
    `transport/expert_domains.py` implements the gathers.

    Args:
        domain_sizes: Expert-domain size `S` of every level, outermost first. `()` (default) is plain expert parallelism
            without a gather. `choose_expert_domains` computes the fastest sizes.
        codec: Encoding of the gathered experts and of the gradients; uncompressed by default.
        gather_again: If True, the backward pass gathers again. If False (default), the gathered experts are kept.
        gradients_home: If True (default, as in this library), gradients of gathered experts return to the homes.
            HybridEP's paper does not count these bytes.
        mean_travels: If True (default, as in this library), the shared expert of `codec` is all-reduced before every
            gather. HybridEP's paper does this in parallel with the backward pass and does not count it.

    Examples:
        >>> from jax_moe_lb.sim import Cluster, Links
        >>> cluster = Cluster((Links("dc", 4, 1.25e9), Links("gpu", 8, 100e9)))
        >>> Migration(domain_sizes=(2, 1)).sizes(cluster), Migration().sizes(cluster)
        ((2, 1), (1, 1))
    """

    domain_sizes: tuple[int, ...] = ()
    codec: Codec = field(default_factory=Codec)
    gather_again: bool = False
    gradients_home: bool = True
    mean_travels: bool = True

    def sizes(self, cluster: Cluster) -> tuple[int, ...]:
        """Return the size of an expert domain at every level of the cluster, outermost first.

        Args:
            cluster: Machine.

        Raises:
            ValueError: `domain_sizes` has another number of levels than the cluster, or a size that is no divisor.
        """
        sizes = self.domain_sizes or (1,) * len(cluster.levels)
        members = tuple(level.size for level in cluster.levels)
        if len(sizes) != len(members) or any(s < 1 or size % s for s, size in zip(sizes, members, strict=True)):
            raise ValueError(f"domain_sizes is {sizes}; expected a divisor of each of the levels' sizes {members}")
        return sizes

    def group_sizes(self, cluster: Cluster) -> tuple[int, ...]:
        """Return the members at every level of a group that exchanges tokens: one rank per expert domain.

        Args:
            cluster: Machine.
        """
        return tuple(level.size // size for level, size in zip(cluster.levels, self.sizes(cluster), strict=True))

    def gathered_bytes(self, model: ModelShape, cluster: Cluster) -> int:
        """Compute the bytes of the gathered experts of one layer on one rank.

        Args:
            model: Sizes of the layer.
            cluster: Machine.
        """
        others = math.prod(self.sizes(cluster)) - 1
        return model.experts // cluster.num_ranks * others * model.expert_bytes

    def mean(self, model: ModelShape, cluster: Cluster) -> tuple[Flow, ...]:
        """Return the all-reduce of the shared expert, required by a codec that encodes differences from it.

        Args:
            model: Sizes of the layer.
            cluster: Machine.
        """
        wanted = self.codec.shares and self.mean_travels and math.prod(self.sizes(cluster)) > 1
        everyone = tuple(level.size for level in cluster.levels)
        return all_reduce(float(model.expert_bytes), everyone, cluster) if wanted else ()

    def gather(self, num_bytes: float, cluster: Cluster) -> tuple[Flow, ...]:
        """Gather from the outermost level inwards; each level forwards the experts gathered by the outer ones.

        Every expert crosses the slow outer links once per domain member there, instead of once per rank.

        Args:
            num_bytes: Bytes of the experts of a rank.
            cluster: Machine.
        """
        # `transport/expert_domains.py` has one all-gather per level, whatever the algorithm.
        levels = self._held(num_bytes, cluster)
        return tuple(one for each, sizes in levels for one in all_gather(each, sizes, cluster))

    def gather_home(self, num_bytes: float, cluster: Cluster) -> tuple[Flow, ...]:
        """Reduce-scatter the gradients of gathered experts to the homes, from the innermost level outwards.

        Encoded gradients take an all-to-all of as many bytes at each level.

        Args:
            num_bytes: Bytes of the gradients of the experts of a rank; 0 if they do not return.
            cluster: Machine.
        """
        levels = reversed(self._held(num_bytes, cluster)) if num_bytes else ()
        return tuple(one for each, sizes in levels for one in reduce_scatter(each, sizes, cluster))

    def _held(self, num_bytes: float, cluster: Cluster) -> list[tuple[float, MessageSizes]]:
        """Return the bytes of a rank before each level, and the members of a group of that level alone."""
        sizes = self.sizes(cluster)
        alone = [tuple(size if level == at else 1 for level, size in enumerate(sizes)) for at in range(len(sizes))]
        return [(num_bytes * math.prod(sizes[:at]), alone[at]) for at in range(len(sizes))]
