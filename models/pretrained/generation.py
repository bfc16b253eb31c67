"""Batched text generation: one prefill pass over the prompts, then one token per sequence in each step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jax_moe_lb import Stats, compiler_options, raise_on_fault
from models.decoder.model import Decoder


@dataclass(frozen=True)
class Sampling:
    """Sampling of the next token.

    Args:
        temperature: divisor of the logits; 0 (default) selects the most likely token.
        top_p: sample from the most likely tokens whose cumulative probability reaches this value; 1 (default) keeps
            all.
        top_k: sample from this many most likely tokens; 0 (default) keeps all.
        min_p: sample from tokens with at least this fraction of the largest probability; 0 (default) keeps all.
        repetition_penalty: divisor of the positive logits of tokens that occurred before, and factor on the negative
            ones; 1 (default) for none.
        seed: seed of the random numbers.

    Raises:
        ValueError: a number is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; expected a finite number of at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; expected more than 0 and at most 1")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; expected at least 0")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; expected 0 to 1")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}; expected a finite number above 0")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; expected at least 0")


def choose(logits: Array, sampling: Sampling, key: Array, occurred: Array | None = None) -> Array:
    """Sample a token for each row of logits.

    Args:
        logits: float32 `[B, V]`.
        sampling: sampling of the tokens.
        key: key of the random numbers.
        occurred: bool `[B, V]`, True for tokens with a repetition penalty; `None` (default) for none.

    Returns:
        int32 `[B]`.
    """
    if occurred is not None and sampling.repetition_penalty != 1:
        penalty = jnp.where(logits > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
        logits = jnp.where(occurred, logits * penalty, logits)
    if sampling.temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    # The order of transformers: temperature, top_k, top_p, min_p.
    scores = logits / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        least = jax.lax.top_k(scores, sampling.top_k)[0][:, -1:]
        scores = jnp.where(scores >= least, scores, -jnp.inf)
    if sampling.top_p < 1:
        ordered = -jnp.sort(-scores, -1)
        shares = jax.nn.softmax(ordered, -1)
        # Keep a token if the probability of those before it is below top_p, so at least one is kept.
        stays = jnp.cumsum(shares, -1) - shares < sampling.top_p
        least = jnp.min(jnp.where(stays, ordered, jnp.inf), -1, keepdims=True)
        scores = jnp.where(scores >= least, scores, -jnp.inf)
    if sampling.min_p > 0:
        least = jnp.max(scores, -1, keepdims=True) + jnp.log(sampling.min_p)
        scores = jnp.where(scores >= least, scores, -jnp.inf)
    return jax.random.categorical(key, scores, -1).astype(jnp.int32)


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    *,
    end_tokens: Sequence[int] = (),
    stop: Callable[[list[int]], bool] | None = None,
    show: Callable[[list[list[int]]], None] | None = None,
    tell: Callable[[Stats], None] | None = None,
    return_routing: bool = False,
) -> Any:
    """Continue prompts of any lengths.

    The same balanced MoE layer serves the many tokens of the prompts and the few tokens of a decoding step.

    Args:
        model: return value of `from_pretrained`.
        prompts: tokens of each sequence, at least one.
        max_new_tokens: maximum number of new tokens per sequence.
        sampling: sampling of the next token (default: most likely token).
        end_tokens: tokens that end a sequence.
        stop: function that returns whether the new tokens of a sequence end it.
        show: function called after each step with the new tokens of all sequences.
        tell: function called with the statistics of each step, `[layers, D, ...]`, first those of the prompts.
        return_routing: if True, also return the experts of each sequence; False by default.

    Returns:
        The new tokens of each sequence, up to and excluding the first of `end_tokens`. With `return_routing`, a pair of
        these and a list of experts, int32 `[layers, T, K]` for each sequence. `T` counts its prompt and its new tokens
        without the last: the tokens read for the prediction of all others.

    Raises:
        ValueError: there is no prompt, a prompt is empty, a token is outside the vocabulary, or `max_new_tokens` is
            below 1.
    """
    _check(model, prompts, max_new_tokens)
    lines: list[list[int]] = [[] for _ in prompts]
    are_open, routing = [True] * len(prompts), []
    for chosen, experts in _steps(model, prompts, max_new_tokens, sampling, tell, return_routing):
        routing.append(experts)
        for i, token in enumerate(chosen.tolist()):
            are_open[i] &= token not in end_tokens
            if are_open[i]:
                lines[i].append(token)
                are_open[i] = stop is None or not stop(lines[i])
        if show is not None:
            show(lines)
        if not any(are_open):
            break
    return (lines, _by_sequence(prompts, lines, routing)) if return_routing else lines


def _by_sequence(
    prompts: Sequence[Sequence[int]], lines: list[list[int]], routing: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return the experts of the tokens read in each sequence, from those of each step, `[layers, B, T, K]`."""
    first, *later = routing
    steps = np.concatenate([first[:, :, :0], *later], 2)
    return [
        np.concatenate([first[:, i, : len(prompt)], steps[:, i, : max(len(line) - 1, 0)]], 1)
        for i, (prompt, line) in enumerate(zip(prompts, lines, strict=True))
    ]


def _steps(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    tell: Callable[[Stats], None] | None,
    return_routing: bool,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the next token of each sequence, int32 `[B]`, and the experts of the tokens read, if requested."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), np.max(lengths)), np.int32)
    occurred = np.zeros((len(prompts), model.config.vocab_size), bool)
    for line, words, prompt in zip(tokens, occurred, prompts, strict=True):
        line[: len(prompt)], words[list(prompt)] = prompt, True
    graph, state = nnx.split(model)

    def extend(
        state: nnx.State,
        tokens: Array,
        positions: Array,
        mask: Array,
        last: Array,
        cache: list,
        occurred: Array,
        key: Array,
    ) -> tuple[nnx.State, Array, Any, list, Array]:
        model = nnx.merge(graph, state)
        logits, stats, cache = model.extend(tokens, positions, mask, cache, return_routing=return_routing)
        chosen = choose(jnp.take_along_axis(logits, last[:, None, None], 1)[:, 0], sampling, key, occurred)
        occurred = occurred.at[jnp.arange(len(prompts)), chosen].set(True)
        return nnx.state(model, nnx.Not(nnx.Param)), chosen, stats, cache, occurred

    # Donate the cache, so that it is updated in place.
    run = jax.jit(extend, donate_argnums=(5, 6), compiler_options=compiler_options(model.mesh))
    cache, seen = model.empty_cache(len(prompts), int(np.max(lengths)) + max_new_tokens), jnp.asarray(occurred)
    place = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    key, last = jax.random.key(sampling.seed), lengths - 1
    arguments = (jnp.asarray(tokens), jnp.asarray(place), jnp.asarray(place < lengths[:, None]), jnp.asarray(last))
    for step in range(max_new_tokens):
        kept, chosen, stats, cache, seen = run(state, *arguments, cache, seen, jax.random.fold_in(key, step))
        nnx.update(state, kept)
        stats, experts = stats if return_routing else (stats, ())
        raise_on_fault(stats)
        if tell is not None:
            tell(stats)
        yield np.asarray(chosen), np.asarray(experts)
        ones, at = np.ones((len(prompts), 1), bool), (lengths + step)[:, None]
        arguments = (chosen[:, None], jnp.asarray(at), jnp.asarray(ones), jnp.zeros(len(prompts), jnp.int32))


def _check(model: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; expected at least 1")
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError("prompt has no tokens; expected at least one per prompt")
    words = model.config.vocab_size
    for token in (token for prompt in prompts for token in prompt):
        if not 0 <= token < words:
            raise ValueError(f"prompt has token {token}; expected 0 to {words - 1}, the vocabulary of the model")
