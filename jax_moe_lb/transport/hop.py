"""One step of a journey of rows: an exchange inside a small group of ranks, and the way back."""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Int, Shaped

from jax_moe_lb.ops.ragged_all_to_all import ragged_all_to_all

Pairs = Int[Array, "G G"]
"""One number for each sender and receiver of a group of `G` ranks."""


@dataclass(frozen=True)
class Hop:
    """Rows from every rank of a group to every other, one block for each pair; all of them know all blocks.

    Args:
        axes: the mesh axes of the group.
        size: rows of each block.
        first: where it starts on the sender.
        lands: where it starts on the receiver.
    """

    axes: tuple[str, ...]
    size: Pairs
    first: Pairs
    lands: Pairs

    def there(self, rows: Shaped[Array, "P H"], into: Shaped[Array, "Q H"], site: str) -> Shaped[Array, "Q H"]:
        """`into`, with the blocks of `rows` where they land."""
        me = jax.lax.axis_index(self.axes)
        return ragged_all_to_all(
            rows,
            into,
            input_offsets=self.first[me],
            send_sizes=self.size[me],
            output_offsets=self.lands[me],
            recv_sizes=self.size[:, me],
            axis_name=self.axes,
            site=site,
        )

    def back(self, rows: Shaped[Array, "Q H"], into: Shaped[Array, "P H"], site: str) -> Shaped[Array, "P H"]:
        """The reverse of `there`."""
        me = jax.lax.axis_index(self.axes)
        return ragged_all_to_all(
            rows,
            into,
            input_offsets=self.lands[:, me],
            send_sizes=self.size[:, me],
            output_offsets=self.first[:, me],
            recv_sizes=self.size[me],
            axis_name=self.axes,
            site=site,
        )
