"""What a dispatch is: it moves token copies to the ranks that serve them, and their outputs back, in rounds."""

import abc
import math
from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Float, Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb.plan import Plan
from jax_moe_lb.topology import Topology
from jax_moe_lb.types import Counts, GroupSizes, Rows

Copies = Float[Array, "C H"]
"""The `C = T * K` token copies of a rank, in the order in which it sends them."""


@pytree
class AnyReceipt:
    """Which copies went where: returned by `Dispatch.address`; each dispatch adds what it needs for itself.

    Args:
        order: the copy, `token * K + k`, that stands at each place of the sending order.
        place: its inverse: the place of each copy.
        rounds: how often `A` rows are needed by the rank with the highest load; where exchanges need all groups to
            take part, by that of any of them.
    """

    order: Int[Array, "C"]
    place: Int[Array, "C"]
    rounds: Int[Array, ""]


@dataclass(frozen=True)
class Dispatch(abc.ABC):
    """How token copies travel. `send` and `send_back` are each other's transposes; gradients rely on it.

    Args:
        headroom: rows that a rank can receive in one round, over the mean: `A = ceil(headroom * T * K)`.
            What does not fit takes another round; nothing is ever dropped.
    """

    headroom: float = 1.05

    def __post_init__(self) -> None:
        if not 0 < self.headroom < math.inf:
            raise ValueError(f"headroom is {self.headroom}; expected a finite number above 0")

    def capacity(self, num_copies: int) -> int:
        """`A`, for `T * K` copies on each rank."""
        return max(1, math.ceil(self.headroom * num_copies))

    @abc.abstractmethod
    def address(self, experts: Int[Array, "T K"], counts: Counts, plan: Plan, topology: Topology) -> Any:
        """Decides for every copy of this rank where it goes.

        Args:
            experts: expert of each copy, `NO_EXPERT` for one that goes nowhere.
            counts: `[R, E]`, the load of all ranks.
            plan: equal on all ranks.
            topology: its expert axes.

        Returns:
            An `AnyReceipt` of its own kind, which `send` and `send_back` read.

        Raises:
            ValueError: the plan says something that this dispatch does not do.
        """

    @abc.abstractmethod
    def send(self, copies: Copies, receipt: Any, i: Int[Array, ""], topology: Topology) -> tuple[Rows, GroupSizes]:
        """Round `i` of the exchange: the rows that this rank serves, sorted by slot, and the rows of each slot.

        Rows beyond the last group are 0.
        """

    @abc.abstractmethod
    def send_back(self, rows: Rows, receipt: Any, i: Int[Array, ""], out: Copies, topology: Topology) -> Copies:
        """The reverse of `send`: writes the outputs of round `i` into `out`, in the sending order."""
