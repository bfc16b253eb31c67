"""Who decides on the paths of an exchange: a plan, a hash, or a transport that reacts to congestion.

What a transport may choose is given to it as a function: `spine_paths`, its GPU's own NIC to the receiver's own over
any spine, as transports in a data centre have it; or `rail_paths`, any rail, as if it could spread over all NICs of a
node.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from benchmarks.fabric.flows import Flows, Policy, Seen
from benchmarks.fabric.paths import Fabric, PathsOf, rail_paths
from jax_moe_lb.core.plan import Plan, rows_between
from jax_moe_lb.core.types import AnyArray, Counts

# ---- what is sent ----------------------------------------------------------------------


def planned_flows(counts: Counts, plan: Plan, fabric: Fabric, row_bytes: int) -> Flows:
    """Make a flow for each pair of GPUs and rail, as `plan.rails` says; without it, on the receiver's own rail.

    Nobody reacts to congestion. With the plan of `RailS` this is RailS. Without rails it is what `Direct` stands for,
    and what NCCL does with PXN: the hop to the right rail inside the sender's node. All that a GPU sends to another on
    one rail is one message, whose share of a link does not depend on its size.

    It leaves out chunks one after the other, and so the wait for the first of them at each rail rank, and what passing
    rows on costs a GPU beside the bandwidth of its port.

    Args:
        counts: `[R, E]`, the load.
        plan: legal for `counts`, of NumPy arrays.
        fabric: of as many GPUs.
        row_bytes: the bytes of a token copy; its width times the size of a number.

    Raises:
        ValueError: counts of another number of GPUs.
    """
    num_gpus = fabric.num_gpus
    _check_size("counts", counts, fabric)
    if plan.rails is None:
        own = np.arange(num_gpus)[:, None] % fabric.gpus_per_node == np.arange(fabric.gpus_per_node)
        rails = rows_between(counts, plan)[:, :, None] * own
    else:
        rails = np.asarray(plan.rails)
    rails = np.where(np.eye(num_gpus, dtype=bool)[:, :, None], 0, rails)
    source, target, rail = np.nonzero(rails)
    paths = rail_paths(fabric, source, target)[np.arange(source.size), rail]
    return Flows(rails[source, target, rail] * float(row_bytes), paths[:, None], np.zeros((source.size, 1), np.intp))


def hashed_flows(
    rows: Int[np.ndarray, "R R"], fabric: Fabric, row_bytes: int, paths: PathsOf, lanes: int, seed: int
) -> Flows:
    """Make a flow for each pair of GPUs, with each of its lanes on a path drawn at random.

    With one lane, and nobody to react, this is ECMP, which hashes a flow's addresses and ports once; a draw stands for
    the hash, so none is worse than a fair one. It is also how the transports below start.

    Args:
        rows: token copies from GPU to GPU, as `rows_between` has them.
        fabric: of as many GPUs.
        row_bytes: the bytes of a token copy.
        paths: the function that lists the paths of a flow, `spine_paths` or `rail_paths`.
        lanes: how many lanes each flow has, at least 1.
        seed: of the draw.

    Raises:
        ValueError: rows of another number of GPUs, or no lane.
    """
    _check_size("rows", rows, fabric)
    if lanes < 1:
        raise ValueError(f"lanes is {lanes}; expected at least 1")
    source, target = np.nonzero(np.where(np.eye(fabric.num_gpus, dtype=bool), 0, rows))
    choices = paths(fabric, source, target)
    drawn = np.random.default_rng(seed).integers(choices.shape[1], size=(source.size, lanes))
    return Flows(rows[source, target] * float(row_bytes), choices, drawn)


def _check_size(name: str, array: AnyArray, fabric: Fabric) -> None:
    if len(array) != fabric.num_gpus:
        raise ValueError(f"{name} are of {len(array)} GPUs; expected the {fabric.num_gpus} of the fabric")


# ---- who reacts ------------------------------------------------------------------------


@dataclass(frozen=True)
class Rehash(Policy):
    """Reacts like PLB (SIGCOMM 2022): a flow marked for `rounds` rounds in a row is hashed anew; give it one lane.

    It leaves out that PLB counts a round by its part of marked packets, rather waits for a flow to be idle, and pauses
    after a timeout; and what packets out of order cost.

    Args:
        rounds: after how many marked rounds in a row a flow is hashed anew; 3, the default, as Linux does for idle
            flows.
    """

    rounds: int = 3

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"Rehash.rounds is {self.rounds}; expected at least 1")

    def react(
        self, flows: Flows, path: Int[np.ndarray, "n W"], seen: Seen, rng: np.random.Generator
    ) -> Int[np.ndarray, "n W"]:
        """Draw another path for flows that were marked long enough; it may be the same."""
        again = seen.rounds_marked[:, None] >= self.rounds
        return np.where(again, rng.integers(flows.choices.shape[1], size=path.shape), path)


@dataclass(frozen=True)
class MinRtt(Policy):
    """Reacts like MPTCP's default scheduler: the next chunk takes the path on which a byte waits least.

    A lane stands for a chunk on its way. Once a round each flow moves one lane, the one that waits longest, to the path
    of the shortest wait, if it is shorter; ties at random. All see the queues of the last round, and so move together.

    It leaves out smoothing, windows of each path, and that chunks of different flows end at different times.
    """

    def react(
        self, flows: Flows, path: Int[np.ndarray, "n W"], seen: Seen, rng: np.random.Generator
    ) -> Int[np.ndarray, "n W"]:
        """Move one lane of each flow, where that helps."""
        wait = seen.queue_s_per_byte[flows.choices[seen.flows]].sum(2)
        flow = np.arange(len(path))
        # All flows see the same queues: with ties to the first path they would all move there.
        best = np.where(wait <= wait.min(1, keepdims=True), rng.random(wait.shape), np.inf).argmin(1)
        here = np.take_along_axis(wait, path, 1)
        worst = here.argmax(1)
        # By more than rounding errors, or lanes would move for ever between paths that are equal.
        helps = wait[flow, best] < here[flow, worst] * (1 - 1e-9)
        moved = path.copy()
        moved[flow[helps], worst[helps]] = best[helps]
        return moved


@dataclass(frozen=True)
class Recycle(Policy):
    """Reacts like REPS (arXiv 2407.21625): a path whose chunk came back unmarked is used again, else one is drawn at
    random.

    A lane stands for the chunks that share an entropy value at a time, and keeps its path for a round.

    It leaves out that REPS does so for every packet, how many entropies it remembers, and failures.
    """

    def react(
        self, flows: Flows, path: Int[np.ndarray, "n W"], seen: Seen, rng: np.random.Generator
    ) -> Int[np.ndarray, "n W"]:
        """Draw new paths for marked lanes."""
        return np.where(seen.marked, rng.integers(flows.choices.shape[1], size=path.shape), path)
