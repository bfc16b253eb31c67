"""Gated delta networks equal a loop over tokens, in rows of several sequences and with a cache."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_moe_lb import System
from models.architectures.published import num_params
from models.config import ParallelConfig
from models.decoder.delta_net import DeltaInputs, GatedDeltaNet, delta_rule
from models.decoder.model import Decoder
from models.dry_run.step import decoder_flops_per_token
from models.mesh import make_mesh
from tests.models.decoder.test_pipeline import decoder_config

BATCH, LENGTH, GROUPS, HEADS, KEYS, VALUES = 2, 11, 2, 4, 5, 6
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1, 1, 1, 2, -1], [3] * LENGTH])


def random_inputs(length=LENGTH):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=(BATCH, length, *shape)), jnp.float32)

    rate, decay = jax.nn.sigmoid(normal(HEADS)), -jnp.exp(2 * normal(HEADS))
    segments = jnp.asarray(np.resize(SEGMENTS, (BATCH, length)) if length == LENGTH else np.zeros((BATCH, length)))
    parts = normal(GROUPS, KEYS), normal(GROUPS, KEYS), normal(HEADS, VALUES), decay, rate
    return DeltaInputs(*parts, segments.astype(jnp.int32)), jnp.zeros((BATCH, HEADS, KEYS, VALUES), jnp.float32)


def token_by_token(given, state):
    """Return outputs and the next state with a loop over tokens, which resets the state at the starts of segments."""
    q, k = (x / jnp.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (given.q, given.k))
    q, k = (jnp.repeat(x, HEADS // GROUPS, 2) for x in (q / KEYS**0.5, k))
    outputs = []
    for t in range(given.v.shape[1]):
        if t:
            stays = given.segments[:, t] == given.segments[:, t - 1]
            state = jnp.where(stays[:, None, None, None], state, 0)
        state = state * jnp.exp(given.log_decay[:, t])[..., None, None]
        missing = given.v[:, t] - jnp.einsum("bnkv,bnk->bnv", state, k[:, t])
        state = state + jnp.einsum("bnk,bnv->bnkv", k[:, t], missing * given.rate[:, t][..., None])
        outputs.append(jnp.einsum("bnkv,bnk->bnv", state, q[:, t]))
    return jnp.stack(outputs, 1), state


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_chunks_equal_a_loop_over_tokens(chunk):
    """Outputs and gradients: one token, as in decoding; chunks with several segments; one chunk."""
    given, state = random_inputs()
    upstream = jax.random.normal(jax.random.key(1), given.v.shape)

    def with_gradients(rule, parts):
        out, transposed = jax.vjp(lambda *parts: rule(DeltaInputs(*parts, given.segments), state)[0], *parts)
        return out, *transposed(upstream)

    got = jax.jit(partial(with_gradients, partial(delta_rule, chunk=chunk)))(given[:-1])
    for ours, expected in zip(got, jax.jit(partial(with_gradients, token_by_token))(given[:-1]), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_a_state_continues_a_sequence(chunk):
    given, empty = random_inputs()
    given = given._replace(segments=jnp.zeros_like(given.segments))
    want, state = token_by_token(given, empty)
    halves = [DeltaInputs(*(part[:, half] for part in given)) for half in (slice(None, 5), slice(5, None))]
    first, between = delta_rule(halves[0], empty, chunk)
    last, end = delta_rule(halves[1], between, chunk)
    np.testing.assert_allclose(jnp.concatenate([first, last], 1), want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(end, state, rtol=1e-4, atol=1e-5)


def test_the_backward_pass_stores_the_states_between_chunks_alone():
    """Neither a state of each token nor products of all pairs of tokens."""
    given, state = random_inputs(256)
    transposed = jax.eval_shape(lambda *parts: jax.vjp(partial(delta_rule, chunk=64), *parts)[1], given, state)
    sizes = {leaf.size for leaf in jax.tree.leaves(transposed)}
    assert max(sizes) == given.v.size < 256 * state.size
    assert 4 * state.size in sizes


@pytest.mark.slow
def test_strong_decay_and_equal_keys_stay_finite():
    given, state = random_inputs(64)
    given = given._replace(k=jnp.ones_like(given.k), log_decay=jnp.full_like(given.log_decay, -50.0))

    def total(given):
        return delta_rule(given, state)[0].sum()

    gradients = jax.grad(total, allow_int=True)(given)
    assert all(np.isfinite(leaf).all() for leaf in gradients[:-1])


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_moe_text"])
def network(request):
    config = decoder_config(request.param, 4)
    return GatedDeltaNet(config, config.delta, rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_packed_sequences_equal_separate_ones(network):
    """The state and the convolution start anew."""
    x = jax.random.normal(jax.random.key(0), (1, 12, 32))
    segments = jnp.asarray([[0] * 5 + [1] + [2] * 4 + [-1] * 2], jnp.int32)
    packed = network(x, None, None, segments, segments >= 0)[0]
    for part in (slice(0, 5), slice(5, 6), slice(6, 10)):
        np.testing.assert_allclose(packed[:, part], network(x[:, part], None, None)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_decoding_equals_the_whole_sequence(network):
    """Of two sequences of different lengths, whose padding changes neither state nor convolution."""
    x, lengths = jax.random.normal(jax.random.key(0), (2, 9, 32)), jnp.asarray([4, 1])
    whole = network(x, None, None)[0]
    mask = jnp.arange(5)[None] < lengths[:, None]
    padded = jnp.where(mask[..., None], x[:, :5], 7.0)
    first, cache = network(padded, None, network.empty_cache(2, 0), mask=mask)
    np.testing.assert_allclose(first[0, :4], whole[0, :4], rtol=1e-4, atol=1e-5)
    for step in range(4):
        at = lengths + step
        y, cache = network(x[jnp.arange(2), at][:, None], None, cache)
        np.testing.assert_allclose(y[:, 0], whole[jnp.arange(2), at], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_packed_rows_of_a_model_equal_separate_sequences(all_devices):
    """Gated attention between delta networks, too."""
    config = decoder_config("qwen3_next", 4)
    model = Decoder(config, mesh=make_mesh(ParallelConfig(1, 1)), system=System(), rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (1, 12), 0, 256)
    segments = jnp.asarray([[0] * 7 + [1] * 5], jnp.int32)
    run = nnx.jit(lambda model, tokens, segments: model(tokens, None, segments)[0])
    packed = run(model, tokens, segments)
    for part in (slice(0, 7), slice(7, 12)):
        alone = run(model, tokens[:, part], jnp.zeros((1, part.stop - part.start), jnp.int32))
        np.testing.assert_allclose(packed[:, part], alone, rtol=1e-4, atol=1e-5)


def test_ideal_operations_count_states_in_place_of_keys():
    config = decoder_config("qwen3_next", 4)
    products = num_params(config)[1] - config.vocab_size * config.embed_dim
    for length in (64, 128):
        keys = length // 2 * config.num_heads * 2 * config.head_dim
        assert decoder_flops_per_token(config, length) == 6 * (products + keys + 3 * 3 * 4 * 16 * 16)
