"""An exchange moves token copies there, in rounds of as many rows as a rank can receive, and their outputs back."""

import abc
import math
from dataclasses import dataclass
from typing import Generic, TypeVar

from jaxtyping import Array, Bool, Float, Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb.plan import Plan
from jax_moe_lb.topology import Topology
from jax_moe_lb.transport.wire import Wire
from jax_moe_lb.types import Counts, GroupSizes, Rows

Copies = Float[Array, "C H"]
"""The `C = T * K` token copies of a rank, in the order in which it sends them."""


@pytree
class Receipt:
    """Says which copies go where. `Exchange.address` returns it; each exchange adds what it needs in a subclass.

    Args:
        order: `[C]` int32, the copy, `token * K + k`, that stands at each place of the sending order.
        place: `[C]` int32, the inverse of `order`: the place of each copy.
        num_going: int32, how many copies go somewhere. They stand first; nothing is ever written for the others, which
            padding tokens have.
        rounds: int32, how often `A` rows are needed by the rank with the highest load. Where all groups must take part
            in an exchange, it is the highest number of any group.
        follows_plan: false where the plan says of the way of rows what cannot be, and they take another; `None` where
            it says nothing that this exchange would have to look at. Equal on all ranks.
    """

    order: Int[Array, "C"]
    place: Int[Array, "C"]
    num_going: Int[Array, ""]
    rounds: Int[Array, ""]
    follows_plan: Bool[Array, ""] | None


ReceiptT = TypeVar("ReceiptT", bound=Receipt)

TILE_ROWS = 128
"""Large receive buffers are a multiple of this, as kernels of accelerators take them; small ones need not be."""


@dataclass(frozen=True)
class Exchange(abc.ABC, Generic[ReceiptT]):
    """Moves token copies. `send` and `send_back` are each other's transposes, and gradients rely on it.

    Derive from `Dispatch`, which serves by it; this class alone says what `in_rounds` needs.

    Args:
        headroom: rows that a rank can receive in one round, over the mean: `A = ceil(headroom * T * K)`, rounded up to
            whole tiles of 128 rows from 1,024 rows on. What does not fit takes another round, and nothing is ever
            dropped. 1.05, the default, is usual with a balancer; take more where loads stay uneven, which costs memory
            and saves rounds.
        max_rounds: how many rounds a program has. `None`, the default: as many as a plan needs, in a loop, before each
            round of which the host of a GPU waits. A number: exactly so many, without a loop; a plan that needs more is
            a fault. 1 is usual behind balancers that promise a load below the headroom.
        wire: a low precision for rows while they travel forward; `None`, the default, leaves them as they are.
        own_kernels: whether products on NVIDIA's Hopper are those of this library, where they fit. They take home
            experts and replicas where they are, and turn nothing around; those of tokamax, the default, want copies,
            which costs memory and traffic (`docs/how-to/gpu.md`). **No GPU has run ours yet**, so compare losses first.
    """

    headroom: float = 1.05
    max_rounds: int | None = None
    wire: Wire | None = None
    own_kernels: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.headroom < math.inf:
            raise ValueError(f"headroom is {self.headroom}; expected a finite number above 0")
        if self.max_rounds is not None and self.max_rounds < 1:
            raise ValueError(f"max_rounds is {self.max_rounds}; expected at least 1, or None for as many as are needed")

    def capacity(self, num_copies: int) -> int:
        """Computes the rows `A` that a rank can receive in one round.

        Args:
            num_copies: `T * K`, the copies of every rank, and so the mean of what a rank receives.
        """
        # At least 1, so that a rank without tokens does not divide by 0 when it counts rounds.
        rows = max(1, math.ceil(self.headroom * num_copies))
        return rows if rows < 8 * TILE_ROWS else math.ceil(rows / TILE_ROWS) * TILE_ROWS

    @abc.abstractmethod
    def address(self, experts: Int[Array, "T K"], counts: Counts, plan: Plan, topology: Topology) -> ReceiptT:
        """Decides for every copy of this rank where it goes.

        Args:
            experts: `[T, K]` int32, the expert of each copy, `NO_EXPERT` for one that goes nowhere.
            counts: `[R, E]` int32, the copies that each rank routes to each expert.
            plan: the plan, legal for `counts` and equal on all ranks.
            topology: its expert axes are the ranks that copies travel between.

        Returns:
            A receipt of this exchange's own kind, which `send` and `send_back` read.

        Raises:
            ValueError: the plan says something that this exchange does not do.
        """

    @abc.abstractmethod
    def send(self, copies: Copies, receipt: ReceiptT, i: Int[Array, ""], topology: Topology) -> tuple[Rows, GroupSizes]:
        """Makes round `i`: the rows that this rank serves, sorted by slot, and the rows of each slot.

        Rows beyond the last group hold anything, even NaN.

        Args:
            copies: `[C, H]`, what this rank sends, in the sending order: copies, or gradients of their outputs.
            receipt: what `address` returned.
            i: int32, the number of the round, from 0.
            topology: that of `address`.

        Returns:
            `[A, H]`, and `[S]` int32.
        """

    @abc.abstractmethod
    def send_back(self, rows: Rows, receipt: ReceiptT, i: Int[Array, ""], out: Copies, topology: Topology) -> Copies:
        """Writes the outputs of round `i` into `out`, in the sending order: the transpose of `send`.

        Args:
            rows: `[A, H]`, one output for each row that `send` returned in this round.
            receipt: what `address` returned.
            i: int32, the number of the round, from 0.
            out: `[C, H]`, the outputs of earlier rounds; rows of other rounds stay as they are.
            topology: that of `address`.
        """
