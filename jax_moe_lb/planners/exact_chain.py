"""What the chain of `exact` in jnp works on: replicas of a domain, and ways to choose. `exact_fill.py` makes them."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb.types import iota


@pytree
class Way:
    """Says which rank gives what to whom in `fill`, for a domain of `M` ranks with `P = M L` experts at home.

    Args:
        liking: `[P]` float32, above 0, what an expert's tokens are multiplied by where the hottest expert is chosen.
        welcome: `[M]` float32, above 0, the same for a rank's room where the one with most room is chosen.
        pressing: float32, at least 0, how much a rank's load above the limit counts beside the tokens of its experts.
        start: `[M]` int32, at least 0, how far below the limit a rank first comes before it receives anything.
        urgent: float32, at least 0, how much a rank's load above the limit counts, divided by the replicas that may
            still be made of its experts. It is read where that number is bounded.
        cleared: int32, at least 0, how many ranks, those of least load, give their experts away before any other gives.
            It is read where `urgent` is.
    """

    liking: Float[Array, "P"]
    welcome: Float[Array, "M"]
    pressing: Float[Array, ""]
    start: Int[Array, "M"]
    urgent: Float[Array, ""]
    cleared: Int[Array, ""]


@pytree
class Filled:
    """Holds the replicas of one domain, with `Z` slots for them on each rank.

    Args:
        expert: `[M, Z]` int32, the expert of each replica, numbered inside the domain; -1 for none.
        tokens: `[M, Z]` int32, the token copies that each replica serves; 0 for none.
        left: `[P]` int32, the token copies that the home of each expert serves.
        load: `[M]` int32, the token copies that each rank serves.
    """

    expert: Int[Array, "M Z"]
    tokens: Int[Array, "M Z"]
    left: Int[Array, "P"]
    load: Int[Array, "M"]


def plain(tokens: Int[Array, "M L"], slots: int) -> Filled:
    """Returns the plan without replicas.

    Args:
        tokens: `[M, L]` int32, the token copies of each expert, by home rank.
        slots: `Z`, the slots for replicas on each rank.
    """
    load = tokens.sum(1, dtype=jnp.int32)
    # Zeros that vary over the mesh axes of the tokens.
    none = jnp.broadcast_to(0 * load[:, None], (load.size, slots))
    return Filled(none - 1, none, tokens.reshape(-1), load)


@pytree
class Chain:
    """Carries the loop of `fill`.

    Args:
        now: the plan so far.
        goal: the load that a rank must come down to before it may receive, and down to which it gives.
        used: the slots of each rank that hold replicas.
        sent: the replicas that were made of the experts of each rank.
        more: whether the last step made a replica.
    """

    now: Filled
    goal: Int[Array, "M"]
    used: Int[Array, "M"]
    sent: Int[Array, "M"]
    more: Bool[Array, ""]

    def give(self, expert: Int[Array, ""], to: Bool[Array, "M"], tokens: Int[Array, ""], limit: Array) -> "Chain":
        """Makes one replica, of so many token copies, or none of 0.

        It writes with masks and not with indices: a TPU is slow at those, and takes a whole line at once anyway.

        Args:
            expert: the expert.
            to: which rank gets the replica; it has a free slot.
            tokens: how many of the token copies that its home serves go there.
            limit: the goal of a rank that has reached its own.
        """
        now, made = self.now, tokens > 0
        of, giver = iota(now.left.size) == expert, iota(to.size) == expert // (now.left.size // to.size)
        here = made & to[:, None] & (iota(now.expert.shape[1])[None] == self.used[:, None])
        load = now.load + jnp.where(to, tokens, 0) - jnp.where(giver, tokens, 0)
        return Chain(
            now=Filled(
                expert=jnp.where(here, expert, now.expert),
                tokens=jnp.where(here, tokens, now.tokens),
                left=now.left - jnp.where(of, tokens, 0),
                load=load,
            ),
            goal=jnp.where(load <= self.goal, limit, self.goal),
            used=self.used + (to & made).astype(jnp.int32),
            sent=self.sent + (giver & made).astype(jnp.int32),
            more=made,
        )
