"""A `Fault` is what a program found wrong with its routing or its plan, as data that the host may look at later.

A program can also stop at once, by calling the host (`legality.ensure`). On accelerators each such condition makes the
host wait for the device, in every layer, so there faults are data: what is wrong is replaced by something harmless, and
`raise_fault` says with the words of the checks what it was.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb.legality import check_homes, check_plan, check_routed
from jax_moe_lb.plan import Plan
from jax_moe_lb.types import AnyArray

Checks = Literal["callback", "deferred"]
"""What a program does about a fault: stop, by a callback to the host, or go on and say so in `Stats.fault`."""

NO_FAULT, ROUTING, HOMES, PLAN, ROUNDS = range(5)
"""The codes of faults. Of several the lowest is told, as the others may follow from it."""


@pytree
class Fault:
    """Holds what the checks of one layer and microbatch looked at, and what they found; equal on all ranks of a group.

    Read it with `raise_fault`.

    Args:
        code: int32, `NO_FAULT` (0) or which check failed.
        counts: `[R, E]` int32, the counts that the plan was made for.
        routed: `[R, 4]` int32, what each rank's router got wrong; see `legality.check_routed`.
        homes: `[E]` int32, the places of experts, or `None` where they never move.
        plan: the plan as the balancer made it. What was served is in `Stats`.
        dynamic: `[E]` booleans, which experts the plan may take from home; `None`: all.
        rounds: int32, the rounds that the plan needs.
        max_rounds: the rounds that the program has; `None` for as many as are needed.
    """

    code: Int[AnyArray, "*D"]
    counts: Int[AnyArray, "*D R E"]
    routed: Int[AnyArray, "*D R 4"]
    homes: Int[AnyArray, "*D E"] | None
    plan: Plan
    dynamic: Bool[AnyArray, "*D E"] | None
    rounds: Int[AnyArray, "*D"]
    max_rounds: Int[AnyArray, "*D"] | None


def fault_code(
    routing: Bool[Array, ""], homes: Bool[Array, ""], plan: Bool[Array, ""], rounds: Bool[Array, ""]
) -> Int[Array, ""]:
    """Computes the code of the first check that failed.

    Args:
        routing: whether the routing is right.
        homes: whether the places of experts are.
        plan: whether the plan is.
        rounds: whether the rounds suffice.
    """
    passed = ((ROUNDS, rounds), (PLAN, plan), (HOMES, homes), (ROUTING, routing))
    code = jnp.int32(NO_FAULT)
    for number, ok in passed:
        code = jnp.where(ok, code, jnp.int32(number))
    return code


def check_rounds(rounds: Any, max_rounds: Any) -> None:
    """Refuses a plan that needs more rounds than a program has.

    Args:
        rounds: how many it needs.
        max_rounds: how many there are.

    Raises:
        ValueError: it needs more.
    """
    if int(rounds) > int(max_rounds):
        raise ValueError(
            f"max_rounds is {int(max_rounds)}; expected at least the {int(rounds)} that the plan needs, "
            "more headroom, or None"
        )


def raise_first(fault: Fault) -> None:
    """Raises what the first check that failed says; does nothing where all passed.

    Args:
        fault: of any number of groups, layers and steps, stacked along leading dimensions.

    Raises:
        ValueError: there is a fault. The message says where, and names rank, expert and numbers.
    """
    codes = np.asarray(fault.code)
    if not codes.any():
        return
    where = tuple(int(i) for i in np.argwhere(codes)[0])
    one: Fault = jax.tree.map(lambda leaf: np.asarray(leaf)[where], fault)
    try:
        _check(one)
    except ValueError as error:
        raise ValueError(f"{_place(where, codes.shape)}{error}") from None
    raise RuntimeError(f"fault {int(one.code)} at {where} passes its check on the host; expected it to fail there too")


def is_of_rounds(fault: Fault) -> bool:
    """Says whether plans that need more rounds than the program has are all that is wrong, as far as can be seen.

    What such a layer returns is NaN, so that routers of the layers behind it are faulty, too: the first fault counts.

    Args:
        fault: of any number of groups, layers and steps, stacked along leading dimensions, in their order.
    """
    codes = np.asarray(fault.code).ravel()
    faulty = codes[codes != NO_FAULT]
    return bool(faulty.size and faulty[0] == ROUNDS and np.isin(faulty, (ROUTING, ROUNDS)).all())


def _check(fault: Fault) -> None:
    if fault.code == ROUTING:
        check_routed(fault.routed, fault.plan.num_experts)
    elif fault.code == HOMES:
        check_homes(fault.homes)
    elif fault.code == PLAN:
        check_plan(fault.plan, fault.counts, fault.dynamic)
    else:
        check_rounds(fault.rounds, fault.max_rounds)


def _place(where: tuple[int, ...], sizes: tuple[int, ...]) -> str:
    """The last dimension is that of groups, as `nn.MoE` returns it, and those before are a caller's own."""
    names = [f"group {where[-1]} of {sizes[-1]}"] if where and sizes[-1] > 1 else []
    names = [f"entry {i}" for i in where[:-1]] + names
    return f"{', '.join(names)}: " if names else ""
