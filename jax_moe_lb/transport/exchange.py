"""What an exchange of token copies is: there in rounds, each of as many rows as a rank can receive, and back."""

import abc
import math
from dataclasses import dataclass
from typing import Generic, TypeVar

from jaxtyping import Array, Float, Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb.plan import Plan
from jax_moe_lb.topology import Topology
from jax_moe_lb.types import Counts, GroupSizes, Rows

Copies = Float[Array, "C H"]
"""The `C = T * K` token copies of a rank, in the order in which it sends them."""


@pytree
class Receipt:
    """Which copies go where. `Exchange.address` returns it; each exchange has a subclass with what it needs itself.

    Args:
        order: the copy, `token * K + k`, that stands at each place of the sending order.
        place: the inverse of `order`: the place of each copy.
        rounds: how often `A` rows are needed by the rank with the highest load. Where all groups must take part in
            an exchange, it is the highest number of any group.
    """

    order: Int[Array, "C"]
    place: Int[Array, "C"]
    rounds: Int[Array, ""]


ReceiptT = TypeVar("ReceiptT", bound=Receipt)


@dataclass(frozen=True)
class Exchange(abc.ABC, Generic[ReceiptT]):
    """How token copies travel. `send` and `send_back` are each other's transposes, and gradients rely on it.

    Args:
        headroom: rows that a rank can receive in one round, over the mean: `A = ceil(headroom * T * K)`. What does not
            fit takes another round, and nothing is ever dropped. 1.05, the default, is usual with a balancer; take
            more where loads stay uneven, which costs memory and saves rounds.
    """

    headroom: float = 1.05

    def __post_init__(self) -> None:
        if not 0 < self.headroom < math.inf:
            raise ValueError(f"headroom is {self.headroom}; expected a finite number above 0")

    def capacity(self, num_copies: int) -> int:
        """The rows `A` that a rank can receive in one round, if every rank has `num_copies = T * K` copies."""
        return max(1, math.ceil(self.headroom * num_copies))

    @abc.abstractmethod
    def address(self, experts: Int[Array, "T K"], counts: Counts, plan: Plan, topology: Topology) -> ReceiptT:
        """Decides for every copy of this rank where it goes.

        Args:
            experts: the expert of each copy, `NO_EXPERT` for one that goes nowhere.
            counts: `[R, E]`, the load of all ranks.
            plan: equal on all ranks.
            topology: its expert axes.

        Returns:
            A receipt of this exchange's own kind, which `send` and `send_back` read.

        Raises:
            ValueError: the plan says something that this exchange does not do.
        """

    @abc.abstractmethod
    def send(self, copies: Copies, receipt: ReceiptT, i: Int[Array, ""], topology: Topology) -> tuple[Rows, GroupSizes]:
        """Makes round `i`: the rows that this rank serves, sorted by slot, and the rows of each slot.

        Rows beyond the last group are 0.
        """

    @abc.abstractmethod
    def send_back(self, rows: Rows, receipt: ReceiptT, i: Int[Array, ""], out: Copies, topology: Topology) -> Copies:
        """The reverse of `send`: writes the outputs of round `i` into `out`, in the sending order."""
