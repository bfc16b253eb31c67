"""Ends of generated sequences, printing, and the repetition penalty."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.generate import Printer
from models.pretrained import generation
from models.pretrained.generation import Sampling, choose, generate


@pytest.fixture
def steps(monkeypatch):
    """Generate fixed tokens for two sequences instead of those of a model."""
    made = [np.array(tokens, np.int32) for tokens in ([1, 5], [2, 6], [9, 7], [3, 9], [4, 8])]
    monkeypatch.setattr(generation, "_check", lambda *arguments: None)
    # The experts of two prompts of two tokens, and then of one token of each sequence.
    routing = [np.full((1, 2, 1 + (step == 0), 1), step, np.int32) for step in range(len(made))]
    monkeypatch.setattr(generation, "_steps", lambda *arguments: iter(zip(made, routing, strict=True)))


def test_sequences_end_at_their_own_tokens_and_texts(steps):
    assert generate(None, [[0], [0]], 5) == [[1, 2, 9, 3, 4], [5, 6, 7, 9, 8]]
    assert generate(None, [[0], [0]], 5, end_tokens=[9]) == [[1, 2], [5, 6, 7]]
    shown = []
    found = generate(
        None,
        [[0], [0]],
        5,
        end_tokens=[9],
        stop=lambda line: line[-1] == 6,
        show=lambda lines: shown.append([list(line) for line in lines]),
    )
    assert found == [[1, 2], [5, 6]]
    assert shown == [[[1], [5]], [[1, 2], [5, 6]], [[1, 2], [5, 6]]]


def test_the_routing_covers_the_tokens_read_for_each_sequence(steps):
    """The first sequence ends after two tokens; the last new token is not read."""
    lines, routing = generate(None, [[0, 0], [0]], 4, end_tokens=[9], return_routing=True)
    assert lines == [[1, 2], [5, 6, 7]]
    assert [one[0, :, 0].tolist() for one in routing] == [[0, 0, 1], [0, 1, 2]]


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
