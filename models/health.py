"""What is wrong with a step ends the run: it is named, and no checkpoint is made of it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_moe_lb import Stats, raise_fault
from models.refusal import Refused


def check_step(step: int, loss: float, stats: Stats, good_step: int | None) -> None:
    """Refuses to go on after a step whose routing, plan or loss is wrong.

    Args:
        step: the number of the step, from 1.
        loss: its loss.
        stats: the statistics of the layers, `[layers, D, ...]`, on the host.
        good_step: the step of the newest checkpoint, to go on from; `None` if there is none.

    Raises:
        Refused: with step and layer, and with rank, expert and numbers where one of them is to blame.
    """
    for layer in np.flatnonzero(np.asarray(stats.fault.code).reshape(len(stats.fault.code), -1).any(1)):
        try:
            raise_fault(jax.tree.map(lambda leaf, i=layer: leaf[i], stats))
        except ValueError as error:
            raise Refused(f"step {step}, layer {layer + 1}: {error}{_go_on(good_step)}") from error
    if not math.isfinite(loss):
        raise Refused(f"step {step}: loss is {loss}, after layers that had finite routing{_go_on(good_step)}")


def check_state(step: int, state: nnx.State, good_step: int | None) -> None:
    """Refuses to make a checkpoint of a state that is not finite.

    Args:
        step: how many steps the run has done.
        state: the state after them.
        good_step: the step of the newest checkpoint; `None` if there is none.

    Raises:
        Refused: with the name of the first array that has such a value.
    """
    finite = jax.device_get(_all_finite(state))
    for path, good in jax.tree.leaves_with_path(finite):
        if not good:
            name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
            raise Refused(f"step {step}: {name} is not finite, of which no checkpoint is made{_go_on(good_step)}")


@jax.jit
def _all_finite(state: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), state)


def _go_on(good_step: int | None) -> str:
    if good_step is None:
        return "; there is no checkpoint yet"
    return f"; --resume goes on from the checkpoint of step {good_step}"
