"""`Steps` does the steps of a run, and those again for which the plan needs more rounds than the program has."""

from collections.abc import Callable

import jax
import numpy as np
from flax import nnx
from jax import Array

from jax_moe_lb import Stats, needs_more_rounds

Step = Callable[[nnx.State, Array], tuple[nnx.State, Array, Stats]]


class Steps:
    """`Steps` waits for each step, which also keeps the devices from being flooded with executions.

    Args:
        step: the program of a step.
        step_again: does a step that needs more rounds; `None` where `step` has all. It is compiled when it is first
            needed.
        tell: is called with a line when that is.
    """

    def __init__(self, step: Step, step_again: Step | None, tell: Callable[[str], None]) -> None:
        self.step, self.step_again, self.tell = step, step_again, tell
        self.num_again = 0

    def __call__(self, number: int, state: nnx.State, tokens: Array) -> tuple[nnx.State, Array, Stats]:
        """Does one step; loss and statistics are on the host.

        Args:
            number: the number of the step, from 1.
            state: is consumed.
            tokens: the batch.
        """
        state, loss, stats = _done(self.step, state, tokens)
        # All processes have the same statistics, so that all of them do it again.
        if self.step_again is None or not needs_more_rounds(stats):
            return state, loss, stats
        self.num_again += 1
        if self.num_again == 1:
            self.tell(
                f"step {number} needs {np.max(stats.fault.rounds)} rounds, more than max_rounds: it is done again, as "
                "others will be that do, by a second program, which is compiled now"
            )
        return _done(self.step_again, state, tokens)


def _done(program: Step, state: nnx.State, tokens: Array) -> tuple[nnx.State, Array, Stats]:
    state, loss, stats = program(state, tokens)
    return state, *jax.device_get((loss, stats))
