"""Published models with one expert per token keep the weights of `transformers`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.small import tiny_decoder

RENORMALISED = ("mixtral", "granitemoe", "gpt_oss", "ernie4_5_moe", "minimax_m2")
BY_FIELD = ("qwen3_moe", "glm4_moe", "deepseek_v3")
LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), jnp.float32)


def weights(architecture, **changed):
    changed |= {"moe_k": 1} if architecture == "ernie4_5_moe" else {}
    router = tiny_decoder(architecture, num_experts_per_tok=1, **changed).router
    return np.asarray(router(LOGITS).weights / router.scale)


@pytest.mark.parametrize("architecture", RENORMALISED)
def test_a_weight_divided_by_itself_stays_one(architecture):
    with pytest.warns(UserWarning, match="renormalise is True"):
        assert (weights(architecture) == 1).all()


@pytest.mark.parametrize("architecture", BY_FIELD)
def test_the_field_decides(architecture):
    score = jax.nn.softmax if architecture == "qwen3_moe" else jax.nn.sigmoid
    with pytest.warns(UserWarning, match="renormalise is True"):
        assert (weights(architecture, norm_topk_prob=True) == 1).all()
    np.testing.assert_allclose(weights(architecture, norm_topk_prob=False)[:, 0], score(LOGITS).max(1), rtol=1e-6)


def test_llama_keeps_the_sigmoid():
    np.testing.assert_array_equal(weights("llama4_text")[:, 0], jax.nn.sigmoid(LOGITS).max(1))
