"""Conversations in rows: whole, by best fit, with padding that is not predicted."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from models.data.chat import Example
from models.data.corpus import CHUNKS_OF_SHORT_TEXT, Conversations, Corpus, Part, best_fit, joined
from models.data.marks import CONTEXT, PADDING, are_predicted, segments, words


def example(first, size, answer=None):
    """Return tokens numbered from `first`, of which those from `answer` on (default the last) are predicted."""
    context = np.arange(size) < (size - 1 if answer is None else answer)
    return Example(np.arange(first, first + size, dtype=np.int32), context)


def some(sizes, seed=0):
    """Return conversations; conversation `i` has the tokens `1000 i`, `1000 i + 1` and so on."""
    answers = np.random.default_rng(seed).integers(1, sizes)
    return [[example(1000 * i, size, answer)] for i, (size, answer) in enumerate(zip(sizes, answers, strict=True))]


def rows_of(conversations, length, held_out=False):
    rows = Conversations.of(conversations).rows(held_out, length)
    return [rows[i] for i in range(len(rows))]


def all_rows(conversations, length):
    unsplit = dataclasses.replace(Conversations.of(conversations), is_split=False)
    rows = unsplit.rows(False, length)
    return [rows[i] for i in range(len(rows))], rows.packing


def test_every_row_has_whole_conversations_and_padding():
    sizes = np.random.default_rng(1).integers(2, 40, 300)
    conversations = some(sizes)
    rows, packing = all_rows(conversations, 63)
    seen = []
    for row in rows:
        assert row.shape == (64,)
        assert row[0] < 0
        plain, numbers = np.asarray(words(jnp.asarray(row))), np.asarray(segments(jnp.asarray(row[None])))[0]
        is_predicted = np.asarray(are_predicted(jnp.asarray(row)))
        # Padding is last, and has no predicted tokens.
        assert not is_predicted[numbers < 0].any()
        assert (np.diff((numbers < 0).astype(int)) >= 0).all()
        for number in range(1, numbers.max() + 1):
            tokens, of_segment = plain[numbers == number], is_predicted[numbers == number]
            ((whole, context, _),) = conversations[tokens[0] // 1000]
            np.testing.assert_array_equal(tokens, whole)
            np.testing.assert_array_equal(of_segment, ~context)
            seen.append(tokens[0] // 1000)
    assert sorted(seen) == list(range(300))
    assert packing.tokens == sizes.sum()
    assert packing.tokens / (64 * packing.rows) > 0.97
    assert (packing.conversations, packing.truncated, packing.unused) == (300, 0, 0)


def test_the_marks_of_a_row():
    (row,), _ = all_rows([[example(5, 4, 2)], [example(50, 3, 2)]], 8)
    first, second = [~(5 + CONTEXT), 6 + CONTEXT, 7, 8], [~(50 + CONTEXT), 51 + CONTEXT, 52]
    assert row.tolist() == [*first, *second, ~(5 + PADDING), 6 + PADDING]
    assert segments(jnp.asarray(row)[None]).tolist() == [[1, 1, 1, 1, 2, 2, 2, -1, -1]]


def test_longer_conversations_are_truncated_and_counted():
    conversations = [[example(0, 30, 3)], [example(1000, 20, 15)], [example(2000, 5, 2)]]
    rows, packing = all_rows(conversations, 9)
    assert [words(jnp.asarray(row)).tolist() for row in rows] == [[*range(10)], [*range(2000, 2005)] * 2]
    assert packing == (3, 2, 1, 15, 2, 55, 55, 0)
    part = Part((Conversations.of(conversations * 4),), 1.0, "talks")
    corpus = Corpus((part,), unit="token", vocab_size=4000)
    cut = "8 truncated to 10 tokens; 4 without an answer in these left out"
    assert corpus.notes(9) == [f"12 conversations in 6 sequences, 0.0% padding; {cut}"]
    assert corpus.notes(40)[0].startswith("12 conversations in 6 sequences, ")
    with pytest.raises(ValueError, match=r"training tokens \(talks\); expected .* an answer in its first 2$"):
        corpus.check_length(1)


def test_text_has_no_notes():
    assert Corpus.of_text(b"abc" * 99, "").notes(5) == []


@pytest.mark.parametrize("capacity", [7, 64])
def test_best_fit_fills_the_row_with_the_least_room(capacity):
    sizes = np.random.default_rng(capacity).integers(1, capacity + 1, 500)
    rows = best_fit(sizes, capacity)
    assert sorted(item for row in rows for item in row) == list(range(500))
    plain: list[list[int]] = []
    for item in sorted(range(500), key=lambda item: -sizes[item]):
        room = [(capacity - sizes[row].sum(), i) for i, row in enumerate(plain)]
        room = [(left, i) for left, i in room if left >= sizes[item]]
        plain[min(room)[1]].append(item) if room else plain.append([item])
    totals, wanted = (sorted(sizes[row].sum() for row in each) for each in (rows, plain))
    assert totals == wanted


def test_examples_of_one_conversation_are_on_one_side():
    conversations = [[example(1000 * i, 6), example(1000 * i + 500, 6)] for i in range(40)]
    packed = Conversations.of(conversations)
    train, held_out = (
        {int(token) // 1000 for row in rows_of(conversations, 11, side) for token in words(jnp.asarray(row))}
        for side in (False, True)
    )
    assert held_out == set(range(CHUNKS_OF_SHORT_TEXT - 1, 40, CHUNKS_OF_SHORT_TEXT))
    assert train == set(range(40)) - held_out
    assert packed.length(True) == 12 * len(held_out)
    assert packed.length(False) + packed.length(True) == len(packed.tokens)
    assert packed.head(True, 8).tolist() == [*range(9000, 9006), 9500, 9501]
    assert [len(rows_of(conversations[:n], 11, True)) > 0 for n in (1, 2, 9)] == [True, True, True]


def test_fingerprints_depend_on_content():
    base = some([5, 6, 7])
    other = [*base[:2], [example(2000, 7, 1)]]
    regrouped = [[*base[0], *base[1]], base[2]]
    prints = {Conversations.of(each).fingerprint for each in (base, other, regrouped, base[:2], some([5, 6, 8]))}
    assert len(prints) == 5
    assert Conversations.of(some([5, 6, 7])).fingerprint in prints


def test_text_beside_conversations_keeps_its_windows():
    text, talks = joined([np.arange(200)]), Conversations.of(some(np.random.default_rng(3).integers(2, 30, 80)))
    alone, both = (Part(streams, 1.0, "").sequences(False, 16) for streams in ((text,), (text, talks)))
    assert len(both) > len(alone) == 11
    np.testing.assert_array_equal([both[i] for i in range(11)], [alone[i] for i in range(11)])
    assert all(both[i][0] < 0 for i in range(11, len(both)))
