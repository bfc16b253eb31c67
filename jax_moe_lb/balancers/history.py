"""Expert loads of the last steps, for balancers that plan from history, summed so that no sum overflows."""

from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb._varying import vary_like
from jax_moe_lb.types import AnyArray, Counts, State, namespace

MAX_EVERY = 46340
"""The largest number of steps whose remainders, each below it, sum to an int32."""


@pytree
class History:
    """The load of every expert in the steps since the last plan; one step's sum must fit int32, that of all need not.

    Args:
        steps: how many steps they are.
        whole: `[E]` int32, `tokens // every`, summed over the steps.
        rest: `[E]` int32, `tokens % every`, summed over the steps.
    """

    steps: Int[AnyArray, "*D"]
    whole: Int[AnyArray, "*D E"]
    rest: Int[AnyArray, "*D E"]


def check_every(every: int) -> None:
    """Refuses a number of steps that cannot be one between plans."""
    if not 1 <= every <= MAX_EVERY:
        raise ValueError(f"every is {every}; expected 1 to {MAX_EVERY} steps")


def no_history(num_experts: int) -> History:
    """Returns the history before the first step, for `E` experts."""
    zeros = np.zeros(num_experts, np.int32)
    return History(np.zeros((), np.int32), zeros, zeros)


def mean(history: History, every: int) -> Int[AnyArray, "E"]:
    """Returns the tokens of each expert per step, rounded down; call it once there are `every` steps."""
    return history.whole + history.rest // every


def observe(history: History, tokens: Int[AnyArray, "E"], every: int) -> History:
    """Returns the history after one step more; the first step after `every` steps starts anew.

    Args:
        history: what was known before the step.
        tokens: `[E]` int32, the load of the step.
        every: the steps between two plans.
    """
    # A factor and not a branch: the same line runs on NumPy arrays and in a program.
    keep = (history.steps < every).astype(np.int32)
    whole, rest = history.whole * keep, history.rest * keep
    steps = namespace(keep).asarray(history.steps * keep + 1)
    return History(steps, whole + tokens // every, rest + tokens % every)


def checked(state: State, expected: Any, counts: Counts) -> State:
    """Refuses a state that is not this balancer's, and lets it vary over the mesh axes of `counts`.

    Args:
        state: what the balancer was given.
        expected: what its `init` returns.
        counts: `[R, E]`, of this microbatch.

    Raises:
        ValueError: a state of another kind, or a leaf of another shape or dtype; the message names it.
    """
    kinds: list[Any] = [jax.tree.structure(tree) for tree in (state, expected)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"state is {kinds[0]}; expected {kinds[1]}, as of init")
    for (path, leaf), want in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(expected), strict=True):
        if (leaf.shape, leaf.dtype) != (want.shape, want.dtype):
            raise ValueError(
                f"state{jax.tree_util.keystr(path)} is {leaf.dtype}{list(leaf.shape)}; "
                f"expected {want.dtype}{list(want.shape)}, for counts {list(counts.shape)}"
            )
    # Balancers return it through conditionals, whose branches must vary over the same mesh axes.
    return vary_like(state, counts)
