"""Compilations of a generator, ends of generated sequences, printing, and the repetition penalty."""

import dataclasses
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.config import ParallelConfig
from models.generate import Printer
from models.mesh import make_mesh, make_system
from models.pretrained import generation
from models.pretrained.generation import Generator, Sampling, bucket, choose
from tests.models.decoder.test_pipeline import decoder_config
from tests.models.small import random_decoder


@pytest.fixture
def generate(monkeypatch):
    """Generate fixed tokens for two sequences instead of those of a model."""
    made = [np.array(tokens, np.int32) for tokens in ([1, 5], [2, 6], [9, 7], [3, 9], [4, 8])]
    monkeypatch.setattr(generation, "_check", lambda *arguments: None)
    # The experts of two prompts of two tokens, and then of one token of each sequence.
    routing = [np.full((1, 2, 1 + (step == 0), 1), step, np.int32) for step in range(len(made))]
    monkeypatch.setattr(Generator, "_steps", lambda *arguments: iter(zip(made, routing, strict=True)))
    monkeypatch.setattr(Generator, "__init__", lambda self: setattr(self, "model", None))
    return Generator()


def test_sequences_end_at_their_own_tokens_and_texts(generate):
    assert generate([[0], [0]], 5) == [[1, 2, 9, 3, 4], [5, 6, 7, 9, 8]]
    assert generate([[0], [0]], 5, end_tokens=[9]) == [[1, 2], [5, 6, 7]]
    shown = []
    found = generate(
        [[0], [0]],
        5,
        end_tokens=[9],
        stop=lambda line: line[-1] == 6,
        show=lambda lines: shown.append([list(line) for line in lines]),
    )
    assert found == [[1, 2], [5, 6]]
    assert shown == [[[1], [5]], [[1, 2], [5, 6]], [[1, 2], [5, 6]]]


def test_the_routing_covers_the_tokens_read_for_each_sequence(generate):
    """The first sequence ends after two tokens; the last new token is not read."""
    lines, routing = generate([[0, 0], [0]], 4, end_tokens=[9], return_routing=True)
    assert lines == [[1, 2], [5, 6, 7]]
    assert [one[0, :, 0].tolist() for one in routing] == [[0, 0, 1], [0, 1, 2]]


class Greedy:
    """Most likely tokens after a prompt, from whole passes without a cache, compiled once."""

    def __init__(self, model, length):
        self.model, self.length = model, length
        self.run = nnx.jit(lambda model, tokens, mask: model(tokens, mask)[0])

    def __call__(self, prompt, number):
        tokens = list(prompt)
        for _ in range(number):
            padded = jnp.array([tokens + [0] * (self.length - len(tokens))], jnp.int32)
            logits = self.run(self.model, padded, jnp.arange(self.length)[None] < len(tokens))
            tokens.append(int(logits[0, len(tokens) - 1].argmax()))
        return tokens[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize("system", ["exact", pytest.param("eplb", marks=pytest.mark.thorough)])
def test_calls_of_a_bucket_compile_once(system, all_devices):
    """Lengths and numbers of prompts within a bucket, seeds and new parameters compile nothing."""
    parallel = ParallelConfig(1, 2, system)
    config = decoder_config("mixtral", 1)
    model = random_decoder(config, make_mesh(parallel), make_system(parallel))
    generate, greedy = Generator(model), Greedy(model, 16)
    prompts = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3], [5, 8]]
    sampling = Sampling(temperature=1.0, top_k=50, seed=1)
    first = generate(prompts, 5)
    drawn = generate(prompts, 5, sampling)
    # The programs of prompts and of single tokens; those of greedy and of random choice.
    programs = generate._read._cache_size(), generate._choose._cache_size()
    assert programs == (2, 2)
    assert first == [greedy(prompt, 5) for prompt in prompts]
    other = [[2, 7, 1, 8, 2], [8] * 6, [1], [3]]
    assert generate(other, 8) == [greedy(prompt, 8) for prompt in other]
    assert generate(prompts, 5, dataclasses.replace(sampling, seed=2)) != drawn
    nnx.update(model.embed, jax.tree.map(lambda leaf: jnp.flip(leaf, 0), nnx.state(model.embed)))
    assert generate(prompts, 5) == [greedy(prompt, 5) for prompt in prompts] != first
    assert (generate._read._cache_size(), generate._choose._cache_size()) == programs


def test_buckets_are_powers_of_two():
    assert list(map(bucket, (1, 2, 3, 4, 5, 1000, 1024, 1025))) == [1, 2, 4, 4, 8, 1024, 1024, 2048]


def test_sequences_beyond_the_positions_of_the_model_are_reported():
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=9, max_positions=8))
    with pytest.warns(match=r"up to 9 tokens, above max_position_embeddings 8"):
        generation._check(model, [[1, 2], [1] * 6], 4)
    with warnings.catch_warnings(action="error"):
        generation._check(model, [[1, 2], [1] * 6], 3)
    assert decoder_config("mixtral", 1).max_positions == 512


def test_a_stream_holds_back_what_may_not_be_printed(capsys):
    text = "ab\u00e9:end"

    def text_of(tokens):
        whole = text.encode()[: len(tokens)].decode(errors="replace")
        return whole[: whole.find(":end")] if ":end" in whole else whole

    printer, printed = Printer("> ", text_of, held=3), []
    for count in range(1, len(text.encode()) + 1):
        printer.show([0] * count)
        printed.append(capsys.readouterr().out)
    printer.show([0] * len(text.encode()), is_last=True)
    printed.append(capsys.readouterr().out)
    assert "".join(printed) == "> ab\u00e9\n"
    assert len(list(filter(None, printed))) > 2


def test_the_penalty_changes_logits_of_earlier_tokens_alone():
    logits = np.random.default_rng(0).normal(size=(200, 5)).astype(np.float32)
    occurred = np.random.default_rng(1).random((200, 5)) < 0.5
    penalized = np.where(occurred, np.where(logits < 0, logits * 1.7, logits / 1.7), logits)
    sampling = Sampling(repetition_penalty=1.7)
    found = choose(jnp.asarray(logits), sampling, jax.random.key(0), jnp.asarray(occurred))
    np.testing.assert_array_equal(found, penalized.argmax(-1))
    assert (found != logits.argmax(-1)).any()
