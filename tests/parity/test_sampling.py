"""Tokens are sampled from those, and with the logits, that `transformers` leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from models.pretrained.generation import Sampling, choose

NUM_DRAWS = 4000


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7, top_k=3),
        Sampling(temperature=1.3, top_p=0.6),
        Sampling(temperature=1.0, min_p=0.3),
        Sampling(temperature=0.8, top_k=5, top_p=0.8, min_p=0.1, repetition_penalty=1.8),
    ],
)
def test_distributions_are_equal(sampling):
    logits = 2 * np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    before = np.array([[0, 1], [2, 2], [7, 3]])
    occurred = np.zeros(logits.shape, bool)
    np.put_along_axis(occurred, before, True, 1)
    processors = [RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)]
    processors += [TemperatureLogitsWarper(sampling.temperature)]
    processors += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    processors += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    processors += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    left = LogitsProcessorList(processors)(torch.asarray(before), torch.asarray(logits))
    shares = torch.softmax(left, -1).numpy()
    keys = jax.random.split(jax.random.key(0), NUM_DRAWS)
    draws = jax.vmap(lambda key: choose(jnp.asarray(logits), sampling, key, jnp.asarray(occurred)))(keys)
    found = np.stack([np.bincount(row, minlength=8) for row in np.asarray(draws).T]) / NUM_DRAWS
    assert ((found > 0) == (shares > 0)).all()
    np.testing.assert_allclose(found, shares, atol=4 * 0.5 / NUM_DRAWS**0.5)
