"""`generate` continues prompts, a batch at a time: one pass over the prompts, then a token of each in every step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jax_moe_lb import Stats, compiler_options, raise_on_fault
from models.decoder.model import Decoder


@dataclass(frozen=True)
class Sampling:
    """This says how the next token is chosen.

    Args:
        temperature: the scores are divided by it; 0, the default, takes the likeliest token.
        top_p: of the likeliest tokens so many are left that they have this share; 1, the default, leaves all.
        seed: the seed of what is drawn.

    Raises:
        ValueError: a number is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; expected a finite number of at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; expected more than 0 and at most 1")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; expected at least 0")


def choose(logits: Array, sampling: Sampling, key: Array) -> Array:
    """Choose a token of each line of float32 logits `[B, V]`; returns int32 `[B]`."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    scores = logits / sampling.temperature
    if sampling.top_p < 1:
        ordered = -jnp.sort(-scores, -1)
        shares = jax.nn.softmax(ordered, -1)
        # A token stays if those before it do not have the share yet: the first one always does.
        stays = jnp.cumsum(shares, -1) - shares < sampling.top_p
        least = jnp.min(jnp.where(stays, ordered, jnp.inf), -1, keepdims=True)
        scores = jnp.where(scores >= least, scores, -jnp.inf)
    return jax.random.categorical(key, scores, -1).astype(jnp.int32)


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    *,
    end_tokens: Sequence[int] = (),
    tell: Callable[[Stats], None] | None = None,
) -> list[list[int]]:
    """Continue prompts of any lengths.

    The layer that serves many tokens of prompts, balanced, serves the few tokens of a step, too.

    Args:
        model: what `from_pretrained` returned.
        prompts: the tokens of each sequence, at least one.
        max_new_tokens: so many tokens follow each.
        sampling: how they are chosen.
        end_tokens: a sequence ends with the first of these.
        tell: is called with the statistics of each step, `[layers, D, ...]`; the first are of the prompts.

    Returns:
        The new tokens of each sequence, up to the first of `end_tokens`, which is left out.

    Raises:
        ValueError: there is no prompt, one is empty, a token is no word, or no token is asked for.
    """
    _check(model, prompts, max_new_tokens)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), np.max(lengths)), np.int32)
    for line, prompt in zip(tokens, prompts, strict=True):
        line[: len(prompt)] = prompt
    graph, state = nnx.split(model)
    options = compiler_options(model.mesh)

    def extend(
        state: nnx.State, tokens: Array, positions: Array, mask: Array, last: Array, cache: list, key: Array
    ) -> tuple[nnx.State, Array, Stats, list]:
        model = nnx.merge(graph, state)
        logits, stats, cache = model.extend(tokens, positions, mask, cache)
        chosen = choose(jnp.take_along_axis(logits, last[:, None, None], 1)[:, 0], sampling, key)
        return nnx.state(model, nnx.Not(nnx.Param)), chosen, stats, cache

    # The cache is written in place.
    run = jax.jit(extend, donate_argnums=5, compiler_options=options)
    cache = model.empty_cache(len(prompts), int(np.max(lengths)) + max_new_tokens)
    place = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    key, last, found = jax.random.key(sampling.seed), lengths - 1, []
    arguments = (jnp.asarray(tokens), jnp.asarray(place), jnp.asarray(place < lengths[:, None]), jnp.asarray(last))
    for step in range(max_new_tokens):
        kept, chosen, stats, cache = run(state, *arguments, cache, jax.random.fold_in(key, step))
        nnx.update(state, kept)
        raise_on_fault(stats)
        if tell is not None:
            tell(stats)
        found.append(np.asarray(chosen))
        if len(end_tokens) and np.isin(np.stack(found), end_tokens).any(0).all():
            break
        ones, at = np.ones((len(prompts), 1), bool), (lengths + step)[:, None]
        arguments = (chosen[:, None], jnp.asarray(at), jnp.asarray(ones), jnp.zeros(len(prompts), jnp.int32))
    return [_until_end(line, end_tokens) for line in np.stack(found, 1).tolist()]


def _check(model: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; expected at least 1")
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError("prompt has no tokens; expected at least one in each")
    words = model.config.vocab_size
    for token in (token for prompt in prompts for token in prompt):
        if not 0 <= token < words:
            raise ValueError(f"prompt has token {token}; expected 0 to {words - 1}, the words of the model")


def _until_end(tokens: list[int], end_tokens: Sequence[int]) -> list[int]:
    ends = [i for i, token in enumerate(tokens) if token in end_tokens]
    return tokens[: ends[0]] if ends else tokens
