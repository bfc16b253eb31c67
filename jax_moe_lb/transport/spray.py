"""Moving token copies over all rails of a domain at once, and their outputs back.

A copy for another domain goes to the rank of its own domain that has the rail, along this rail to the rank of equal
offset in the other domain, and from there to the rank that serves it. So no byte between domains leaves its rail.
Copies inside a domain go straight there.

Rounds are those of `Direct`: the same `A` copies of every rank's stream, in the same order, so that the outputs are
the same to the bit. Relays have buffers too. A round whose copies do not fit into them is done in several steps, each
of as many copies of every stream as fit.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb.legality import check_plan, ensure
from jax_moe_lb.ops.one_way import agreed
from jax_moe_lb.plan import Plan, load
from jax_moe_lb.split import nearest_first
from jax_moe_lb.topology import Topology
from jax_moe_lb.transport.dispatch import AnyReceipt, Copies, Dispatch
from jax_moe_lb.transport.packing import arriving_rows, by_slot, landings, sending_order
from jax_moe_lb.transport.rail_hops import (
    Relays,
    Way,
    Window,
    by_own_rail,
    by_relay,
    find_way,
    fullest,
    rail_axes,
    relays_of,
)
from jax_moe_lb.types import Counts, GroupSizes, Rows, iota


@pytree
class SprayReceipt(AnyReceipt):
    """Which copies go where, and by whom: returned by `Spray.address`, read by everything after it.

    Args:
        arriving: copies from each rank for each of this rank's slots.
        relays: what passes by this rank.
        step: rows of each stream that travel at once, so that all relays can hold them.
        steps: so many make a round.
    """

    arriving: Int[Array, "R S"]
    relays: Relays
    step: Int[Array, ""]
    steps: Int[Array, ""]

    def window(self, i: Int[Array, ""], k: Int[Array, ""], capacity: int) -> Window:
        """Step `k` of round `i`."""
        return _window(i, k, self.step, capacity)


@dataclass(frozen=True)
class Spray(Dispatch):
    """Token copies for other domains are sprayed over the rails, as `plan.rails` says.

    Without `plan.rails` they travel along the rail of the rank that serves them.

    A relay holds at most `max(A, R)` rows, which is enough for one step per round as long as the plan loads ranks and
    rails evenly. What does not fit takes more steps; nothing is ever dropped.
    """

    def address(self, experts: Int[Array, "T K"], counts: Counts, plan: Plan, topology: Topology) -> SprayReceipt:
        """Decides for every copy of this rank where it goes, and by which relays; see `Dispatch`.

        Raises:
            ValueError: no innermost expert axes make up a domain, or the plan has another number of rails. Rails that
                do not add up to what the ranks send stop the program on all of them.
        """
        rail_axes(topology)
        me = jax.lax.axis_index(topology.expert_axes)
        going = nearest_first(counts, plan.quota, me, plan.domain, plan.split)
        order = sending_order(experts.reshape(-1), going, plan)
        passing = relays_of(_rows_by_relay(going.sum(0, dtype=jnp.int32), counts, plan, topology), me)
        capacity = self.capacity(experts.size)
        rounds = agreed((load(plan).max() + capacity - 1) // capacity, topology.expert_axes)
        step = _rows_per_step(passing, capacity, rounds, topology)
        return SprayReceipt(
            order=order,
            place=jnp.zeros_like(order).at[order].set(iota(experts.size)),
            rounds=rounds,
            arriving=arriving_rows(counts, plan, me),
            relays=passing,
            step=step,
            steps=(capacity + step - 1) // step,
        )

    def send(
        self, copies: Copies, receipt: SprayReceipt, i: Int[Array, ""], topology: Topology
    ) -> tuple[Rows, GroupSizes]:
        """Round `i`: inside domains, and over the rails to the others."""
        num_copies, width = copies.shape
        capacity = self.capacity(num_copies)
        coming = landings(receipt.arriving, i, capacity)
        slot_rows = _slot_rows(coming, capacity)
        landed = jnp.zeros_like(copies, shape=(capacity, width))
        relayed = jnp.zeros_like(copies, shape=(_relay_rows(capacity, topology), width))

        def step(k: Array, rows: Rows) -> Rows:
            way = _way(receipt, i, k, num_copies, capacity, topology)
            arrived = way.near.there(copies, landed, "dispatch, inside a domain")
            if way.far is not None:
                far = way.far
                relay = far.to_relay.there(copies[far.pack], relayed, "dispatch, to a rail")
                relay = far.along_rail.there(relay[far.by_domain], relayed, "dispatch, along a rail")
                arrived = far.from_relay.there(relay[far.by_rank], arrived, "dispatch, from a rail")
            return rows.at[_rows_of_way(way, slot_rows, i)].set(arrived, mode="drop")

        return jax.lax.fori_loop(0, receipt.steps, step, landed), coming.sum(0, dtype=jnp.int32)

    def send_back(
        self, rows: Rows, receipt: SprayReceipt, i: Int[Array, ""], out: Copies, topology: Topology
    ) -> Copies:
        """The reverse of `send`."""
        num_copies, (capacity, width) = out.shape[0], rows.shape
        slot_rows = _slot_rows(landings(receipt.arriving, i, capacity), capacity)
        relayed = jnp.zeros_like(rows, shape=(_relay_rows(capacity, topology), width))

        def step(k: Array, out: Copies) -> Copies:
            way = _way(receipt, i, k, num_copies, capacity, topology)
            arrived = rows.at[_rows_of_way(way, slot_rows, i)].get(mode="fill", fill_value=0)
            out = way.near.back(arrived, out, "combine, inside a domain")
            if way.far is None:
                return out
            far = way.far
            relay = far.from_relay.back(arrived, relayed, "combine, to a rail")
            relay = far.along_rail.back(relayed.at[far.by_rank].set(relay), relayed, "combine, along a rail")
            packed = far.to_relay.back(
                relayed.at[far.by_domain].set(relay), jnp.zeros_like(out), "combine, from a rail"
            )
            place = jnp.where(iota(num_copies) < far.num_packed, far.pack, num_copies)
            return out.at[place].set(packed, mode="drop")

        return jax.lax.fori_loop(0, receipt.steps, step, out)


def _rows_by_relay(sent: Int[Array, "R"], counts: Counts, plan: Plan, topology: Topology) -> Int[Array, "R R M"]:
    """What the plan says, checked: each rank knows what it sends by the split rule."""
    axes = topology.expert_axes
    if plan.rails is None:
        return by_own_rail(jax.lax.all_gather(sent, axes, to="invarying"), topology)
    rows = by_relay(plan.rails, topology)
    adds_up = (plan.rails[jax.lax.axis_index(axes)].sum(1, dtype=jnp.int32) == sent).all()
    return rows + ensure(jax.lax.pmin(adds_up.astype(jnp.int32), axes) == 1, check_plan, plan, counts)


def _window(i: Int[Array, ""], k: Int[Array, ""], step: Int[Array, ""], capacity: int) -> Window:
    first = i * capacity + k * step
    return first, jnp.minimum(first + step, (i + 1) * capacity)


def _rows_per_step(relays: Relays, capacity: int, rounds: Int[Array, ""], topology: Topology) -> Int[Array, ""]:
    """The most rows of each stream, `A` or what halving it gives, of which no relay gets more than it can hold."""

    def most_held(step: Array) -> Array:
        steps = (capacity + step - 1) // step

        def one(number: Array, most: Array) -> Array:
            window = _window(number // steps, number % steps, step, capacity)
            return jnp.maximum(most, fullest(relays, window, topology))

        none = relays.passing.size.sum(dtype=jnp.int32) * 0
        most = jax.lax.pmax(jax.lax.fori_loop(0, rounds * steps, one, none), topology.expert_axes)
        return agreed(most, topology.expert_axes)

    def halve(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        step = (carry[0] + 1) // 2
        return step, most_held(step)

    whole = rounds * 0 + capacity
    limit = _relay_rows(capacity, topology)
    return jax.lax.while_loop(lambda carry: carry[1] > limit, halve, (whole, most_held(whole)))[0]


def _relay_rows(capacity: int, topology: Topology) -> int:
    """Rows of a relay's buffer. In steps of one row of each stream it gets at most one for every rank."""
    return max(capacity, topology.num_ranks)


def _way(
    receipt: SprayReceipt, i: Int[Array, ""], k: Int[Array, ""], num_copies: int, capacity: int, topology: Topology
) -> Way:
    num_relayed = _relay_rows(capacity, topology)
    return find_way(receipt.relays, receipt.window(i, k, capacity), num_copies, num_relayed, capacity, topology)


def _slot_rows(coming: Int[Array, "R S"], capacity: int) -> Int[Array, "A"]:
    """Of each row of a round's part of the stream, its row by slot."""
    order = by_slot(coming, capacity)
    return jnp.zeros_like(order).at[order].set(iota(capacity))


def _rows_of_way(way: Way, slot_rows: Int[Array, "A"], i: Int[Array, ""]) -> Int[Array, "A"]:
    """Of each row as it is received, its row by slot; `A` for none."""
    capacity = slot_rows.shape[0]
    row = jnp.clip(way.stream_row - i * capacity, 0, capacity - 1)
    return jnp.where(way.stream_row < 0, capacity, slot_rows[row])
