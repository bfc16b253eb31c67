"""Steps that need more than `max_rounds` are repeated, and a run learns the same as without the limit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config import ParallelConfig
from models.training.faults import StepRunner
from tests.models.small import CONFIG, batch, programs

HEADROOM = 2.1
"""Without balancing, some steps of this run need more than one round."""


IN_TWO = dataclasses.replace(CONFIG.batch, accumulate=2)


def limited(system: str, headroom: float, **options):
    parallel = ParallelConfig(expert_parallel=8, system=system, headroom=headroom, max_rounds=1)
    return dataclasses.replace(CONFIG, parallel=parallel, **options)


def unlimited(config):
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, max_rounds=None))


def trained(config):
    """Return state, losses and counts of a few steps, the repeated steps, and the messages."""
    made, told = programs(config), []
    do = StepRunner(made.step, made.step_again, told.append)
    state, losses, counts, again = made.init(), [], [], []
    for step in range(1, config.steps + 1):
        before = do.num_again
        state, loss, _, stats = do(step, state, batch(config, step))
        losses.append(float(loss))
        counts.append(np.asarray(stats.counts))
        if do.num_again > before:
            again.append(step)
    return state, losses, counts, again, told


@pytest.mark.thorough
@pytest.mark.parametrize(
    "config",
    [
        limited("plain", HEADROOM),
        # Balancer state, biases and loads are unchanged, too.
        limited("eplb", 1.7, batch=IN_TWO, model=dataclasses.replace(CONFIG.model, bias_rate=1e-3)),
    ],
    ids=["plain", "eplb"],
)
def test_a_run_learns_the_same(config):
    state, losses, counts, again, told = trained(config)
    want, want_losses, want_counts, _, _ = trained(unlimited(config))
    assert 0 < len(again) < config.steps
    assert len(told) == 1
    assert told[0].startswith(f"step {again[0]} needs 2 rounds, more than max_rounds; compiling a second program")
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    np.testing.assert_array_equal(counts, want_counts)
    for (path, a), b in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, err_msg=jax.tree_util.keystr(path))


@pytest.mark.thorough
def test_a_step_that_is_not_served_changes_nothing():
    config = limited("eplb", 0.5)
    made, tokens = programs(config), batch(config)
    state = made.init()
    before = jax.device_get(state)
    after, loss, _, stats = made.step(state, tokens)
    assert (np.asarray(stats.fault.code) > 0).any()
    assert np.isnan(loss)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), before)
    # Validation serves it.
    assert np.isfinite(made.evaluate(after, tokens))


def test_without_a_limit_there_is_one_program():
    assert programs(CONFIG).step_again is None


@pytest.mark.thorough
def test_only_a_lack_of_rounds_is_done_again():
    """A router fault occurs in any program."""
    config = limited("plain", HEADROOM)
    made = programs(config)

    def no_numbers(leaf):
        return jnp.full_like(leaf, np.nan) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    do = StepRunner(made.step, made.step_again, lambda text: None)
    *_, stats = do(1, jax.tree.map(no_numbers, made.init()), batch(config))
    assert (stats.fault.code > 0).all()
    assert do.num_again == 0
