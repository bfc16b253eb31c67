"""Path selection of an exchange: by a plan, by a hash, or by a transport reacting to congestion.

The available paths are a function: `spine_paths`, from the own NIC to the receiver's own NIC over any spine, as in data
center transports; or `rail_paths`, over any rail, as if a transport could use all NICs of a node.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from benchmarks.papers.flows import Flows, Lanes, Policy, Seen
from benchmarks.papers.paths import Fabric, PathsOf, rail_paths
from jax_moe_lb.core.plan import Plan, rows_between
from jax_moe_lb.core.types import Counts

# ---- flows -----------------------------------------------------------------------------


def planned_flows(counts: Counts, plan: Plan, fabric: Fabric, row_bytes: int) -> Flows:
    """Return a flow for each pair of GPUs and rail, according to `plan.rails`, or else on the receiver's own rail.

    The flows do not react to congestion. With the plan of `RailS` this is RailS. Without rails it corresponds to
    `Direct`, and to NCCL with PXN: a hop to the right rail inside the sender's node. All rows of a pair on one rail
    form one message, whose share of a link does not depend on its size.

    The order of chunks is not modelled, and so neither is the wait for the first one at each rail rank. Forwarding
    costs port bandwidth only.
    """
    num_gpus = fabric.num_gpus
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
    """Return a flow for each pair of GPUs, with each of its lanes on a random path.

    With one lane and no policy this is ECMP, which hashes addresses and ports once per flow; the random choice models
    an ideal hash. It is also the initial state of the transports below.
    """
    source, target = np.nonzero(np.where(np.eye(fabric.num_gpus, dtype=bool), 0, rows))
    choices = paths(fabric, source, target)
    drawn = np.random.default_rng(seed).integers(choices.shape[1], size=(source.size, lanes))
    return Flows(rows[source, target] * float(row_bytes), choices, drawn)


# ---- reactive policies -------------------------------------------------------------------


@dataclass(frozen=True)
class Rehash(Policy):
    """Policy like PLB (SIGCOMM 2022): a flow marked for `rounds` consecutive rounds is rehashed; use one lane.

    Not modelled: PLB counts a round by its fraction of marked packets, prefers idle flows, and pauses after a timeout;
    and the cost of reordering.
    """

    rounds: int = 3

    def react(self, flows: Flows, path: Lanes, seen: Seen, rng: np.random.Generator) -> Lanes:
        """Choose a random path, possibly the same, for flows marked long enough."""
        again = seen.rounds_marked[:, None] >= self.rounds
        return np.where(again, rng.integers(flows.choices.shape[1], size=path.shape), path)


@dataclass(frozen=True)
class MinRtt(Policy):
    """Policy like MPTCP's default scheduler: the next chunk takes the path with the shortest wait.

    A lane represents a chunk in flight. Once per round each flow moves its lane with the longest wait to the path with
    the shortest wait, if that is shorter; ties are random. All flows see the queues of the last round, and so move
    together.

    Smoothing, congestion windows per path, and different end times of chunks are not modelled.
    """

    def react(self, flows: Flows, path: Lanes, seen: Seen, rng: np.random.Generator) -> Lanes:
        """Move one lane of each flow if its wait decreases."""
        wait = seen.queue_s_per_byte[flows.choices[seen.flows]].sum(2)
        flow = np.arange(len(path))
        # As all flows see the same queues, fixed ties would send all of them to one path.
        best = np.where(wait <= wait.min(1, keepdims=True), rng.random(wait.shape), np.inf).argmin(1)
        here = np.take_along_axis(wait, path, 1)
        worst = here.argmax(1)
        # Require more than rounding errors; otherwise lanes would alternate between equal paths forever.
        helps = wait[flow, best] < here[flow, worst] * (1 - 1e-9)
        moved = path.copy()
        moved[flow[helps], worst[helps]] = best[helps]
        return moved


@dataclass(frozen=True)
class Recycle(Policy):
    """Policy like REPS (arXiv 2407.21625): reuse a path whose chunk returned unmarked, else choose a random one.

    A lane represents the chunks sharing an entropy value at a time, and keeps its path for a round. Per-packet
    selection, the limited entropy cache, and failures are not modelled.
    """

    def react(self, flows: Flows, path: Lanes, seen: Seen, rng: np.random.Generator) -> Lanes:
        """Choose new random paths for marked lanes."""
        return np.where(seen.marked, rng.integers(flows.choices.shape[1], size=path.shape), path)
