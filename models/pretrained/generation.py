"""Batched text generation: one prefill pass over the prompts, then one token per sequence in each step."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jax_moe_lb import Stats, compiler_options, raise_on_fault
from jax_moe_lb.core.checks import Natural, NonNegative, Positive, checked_fields
from models.decoder.attention import Cache
from models.decoder.model import Decoder
from models.mesh import batch_sharding, state_shardings

FINITE = 1e-30, 1e30  # range of the settings of sampling besides 0: quotients of float32 logits stay finite


@dataclass(frozen=True)
@checked_fields
class Sampling:
    """Sampling of the next token."""

    temperature: NonNegative = 0.0  # divisor of the logits; 0 (default) selects the most likely token
    # Sample from the most likely tokens whose cumulative probability reaches this value; 1 (default) keeps all
    top_p: Positive = 1.0
    top_k: Natural = 0  # sample from this many most likely tokens; 0 (default) keeps all
    # Sample from tokens with at least this fraction of the largest probability; 0 (default) keeps all
    min_p: NonNegative = 0.0
    # Divisor of the positive logits of tokens that occurred before, and factor on the negative ones; 1 (default) for
    # none
    repetition_penalty: Positive = 1.0
    seed: Natural = 0  # seed of the random numbers

    def __post_init__(self) -> None:
        for name in ("top_p", "min_p"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at most 1")
        least, most = FINITE
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            if (value := getattr(self, name)) and not least <= value <= most:
                raise ValueError(f"{name} is {value}; expected {least} to {most}, as logits are float32")


def choose(logits: Array, sampling: Sampling, key: Array, occurred: Array | None = None) -> Array:
    """Sample a token for each row of logits."""
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


class Generator:
    """Generator of text, which compiles its programs once for each bucket of sizes."""

    # The same balanced MoE layer serves the many tokens of the prompts and the few tokens of a decoding step. The
    # numbers of prompts per device, of their tokens and of cached tokens are padded to powers of two. Padding is not
    # routed. A call whose padded sizes occurred before compiles nothing. Other settings of `Sampling` than the seed
    # compile their choice of tokens alone. Each call reads the parameters of the model, which may change between calls.

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self._everywhere, self._lines = NamedSharding(model.mesh, PartitionSpec()), batch_sharding(model.mesh)
        _, *states = nnx.split(model, nnx.Param, ...)
        self._params, self._others = (state_shardings(state, model.mesh) for state in states)
        # With shardings of XLA's choice, the second step would compile again. The cache and the occurred tokens are
        # donated for an update in place.
        self._read = jax.jit(
            _read,
            static_argnums=(0, 1),
            donate_argnums=5,
            out_shardings=(self._others, self._everywhere, None, self._lines),
            compiler_options=compiler_options(model.mesh),
        )
        self._choose = jax.jit(_chosen, static_argnums=0, donate_argnums=2, out_shardings=self._everywhere)

    def __call__(
        self,
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
        """Return the new tokens of each prompt, up to and excluding the first of `end_tokens`."""
        # `stop` returns whether the new tokens of a sequence end it. After each step, `show` gets the new tokens of all
        # sequences and `tell` the statistics, `[layers, D, ...]`, first those of the prompts. With `return_routing`,
        # the result is a pair with the experts of each sequence, int32 `[layers, T, K]`, for the tokens read.
        _check(self.model, prompts, max_new_tokens)
        lines: list[list[int]] = [[] for _ in prompts]
        are_open, routing = [True] * len(prompts), []
        for chosen, experts in self._steps(prompts, max_new_tokens, sampling, tell, return_routing):
            routing.append(experts)
            for i, line in enumerate(lines):
                token = int(chosen[i])
                are_open[i] &= token not in end_tokens
                if are_open[i]:
                    line.append(token)
                    are_open[i] = stop is None or not stop(line)
            if show is not None:
                show(lines)
            if not any(are_open):
                break
        return (lines, _by_sequence(prompts, lines, routing)) if return_routing else lines

    def _steps(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling,
        tell: Callable[[Stats], None] | None,
        return_routing: bool,
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the next token of each sequence, int32 `[B]`, and the experts of the tokens read, if requested."""
        tokens, lengths, occurred = _padded(prompts, self.model.config.vocab_size, self.model.mesh.size)
        batch, place = len(tokens), np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        graph, *states = nnx.split(self.model, nnx.Param, ...)
        cache = self.model.empty_cache(batch, bucket(int(max(lengths)) + max_new_tokens))
        shardings = self._params, self._others, self._lines, self._everywhere
        params, others, cache, seen = jax.device_put((*states, cache, occurred), shardings)
        how = dataclasses.replace(sampling, seed=0)
        key, are_real = jax.random.key(sampling.seed), lengths[:, None] > 0
        arguments = tokens, place, place < lengths[:, None], np.maximum(lengths - 1, 0)
        for step in range(max_new_tokens):
            others, logits, stats, cache = self._read(graph, return_routing, params, others, arguments, cache)
            chosen, seen = self._choose(how, logits, seen, key, np.int32(step))
            stats, experts = stats if return_routing else (stats, ())
            raise_on_fault(stats)
            if tell is not None:
                tell(stats)
            yield np.asarray(chosen), np.asarray(experts)
            arguments = np.asarray(chosen)[:, None], (lengths + step)[:, None], are_real, np.zeros(batch, np.int32)


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


def bucket(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


def _padded(
    prompts: Sequence[Sequence[int]], vocab_size: int, devices: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens `[B, T]` padded to buckets, the length of each prompt, and bool `[B, V]`, its tokens."""
    # Each device has the same number of sequences.
    lengths = np.zeros(devices * bucket(-(-len(prompts) // devices)), np.int32)
    lengths[: len(prompts)] = list(map(len, prompts))
    tokens = np.zeros((len(lengths), bucket(max(map(len, prompts)))), np.int32)
    occurred = np.zeros((len(lengths), vocab_size), bool)
    for line, words, prompt in zip(tokens, occurred, prompts, strict=False):
        line[: len(prompt)], words[list(prompt)] = prompt, True
    return tokens, lengths, occurred


def _read(
    graph: nnx.GraphDef, return_routing: bool, params: nnx.State, others: nnx.State, given: Any, cache: list[Cache]
) -> tuple[nnx.State, Array, Any, list[Cache]]:
    """Return the state that changes, the logits after the last token of each sequence, statistics and the cache."""
    model, (tokens, positions, mask, last) = nnx.merge(graph, params, others), given
    logits, stats, cache = model.extend(tokens, positions, mask, cache, return_routing=return_routing)
    logits = jnp.take_along_axis(logits, last[:, None, None], 1)[:, 0]
    return nnx.state(model, nnx.Not(nnx.Param)), logits, stats, cache


def _chosen(sampling: Sampling, logits: Array, occurred: Array, key: Array, step: Array) -> tuple[Array, Array]:
    """Return the next token of each sequence, and the tokens that occurred in it."""
    chosen = choose(logits, sampling, jax.random.fold_in(key, step), occurred)
    return chosen, occurred.at[jnp.arange(len(chosen)), chosen].set(True)


def _check(model: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; expected at least 1")
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError("prompt has no tokens; expected at least one per prompt")
    words = model.config.vocab_size
    for token in (token for prompt in prompts for token in prompt):
        if not 0 <= token < words:
            raise ValueError(f"prompt has token {token}; expected 0 to {words - 1}, the vocabulary of the model")
    # The last new token is not read.
    length, most = max(map(len, prompts)) + max_new_tokens - 1, model.config.max_positions
    if most is not None and length > most:
        warnings.warn(f"sequences have up to {length} tokens, above max_position_embeddings {most}", stacklevel=3)
