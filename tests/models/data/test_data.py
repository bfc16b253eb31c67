import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from models.config import ParallelConfig
from models.data.corpus import (
    CHUNK_TOKENS,
    CHUNKS_PER_CYCLE,
    Batches,
    Conversations,
    Corpus,
    Part,
    Stream,
    StreamRows,
    joined,
    place_rows,
    rows_here,
)
from models.data.sources import check_held_out, corpus_from, default_corpus
from models.data.tokenizers import TokenizerFile
from models.mesh import batch_sharding, make_mesh
from tests.models.data.test_conversations import some


def whole(stream, held_out):
    return stream.window(held_out, 0, stream.length(held_out))


def unmarked(tokens):
    return np.where(tokens < 0, ~tokens, tokens)


@pytest.mark.parametrize("num_tokens", [1, 9, 400, 40_003, 3 * CHUNKS_PER_CYCLE * CHUNK_TOKENS + 123])
def test_sides_are_disjoint_and_complete(num_tokens):
    """Each token equals its position, for tracing."""
    stream = Stream(np.arange(num_tokens), np.zeros(0, np.int64))
    train, held_out = (unmarked(whole(stream, side)) for side in (False, True))
    np.testing.assert_array_equal(np.sort(np.concatenate([train, held_out])), np.arange(num_tokens))
    assert num_tokens < 10 or 0.05 < len(held_out) / num_tokens < 0.15
    # Every discontinuity of the text is marked.
    for side in (train, held_out):
        marked = whole(stream, side is held_out) < 0
        np.testing.assert_array_equal(marked[1:], np.diff(side) != 1)


def test_a_window_marks_where_documents_begin():
    stream = joined([np.array([5, 6, 7]), np.array([], int), np.array([8]), np.array([9, 1, 2, 3, 4, 5])])
    assert stream.window(False, 0, 8).tolist() == [5, 6, 7, ~8, ~9, 1, 2, 3]
    assert stream.window(False, 2, 3).tolist() == [7, ~8, ~9]


def numbered(num_tokens, first=0):
    return Stream(np.arange(first, first + num_tokens), np.zeros(0, np.int64))


def test_an_epoch_has_every_window_once_and_each_another_order():
    part = Part((numbered(101), numbered(51, 1000)), 1.0, "")
    corpus, windows = Corpus((part,), vocab_size=2000), part.sequences(False, 5)
    starts = [unmarked(windows[i])[0] for i in range(len(windows))]
    assert starts == [*range(0, 90, 5), *range(1000, 1045, 5)]
    sequences = corpus.sequences(3, 5)
    epochs = [[unmarked(sequences[e * len(starts) + i])[0] for i in range(len(starts))] for e in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [starts] * 3
    assert len({tuple(order) for order in [starts, *epochs]}) == 4
    other = corpus.sequences(4, 5)
    assert [unmarked(other[i])[0] for i in range(2)] != epochs[0][:2]


def test_parts_take_turns_by_weight():
    parts = Part((numbered(200),), 3.0, "a"), Part((numbered(5000, 1000),), 1.0, "b")
    corpus = Corpus(parts, vocab_size=6000)
    batch = np.concatenate([corpus.batch(0, step, 8, 5) for step in range(1, 6)])
    assert (unmarked(batch)[:, 0] < 1000).sum() == 30
    held_out = np.concatenate(corpus.validation_batches(2, 8, 3))
    assert held_out.shape == (16, 4)
    assert (unmarked(held_out)[:, 0] < 1000).sum() == 12
    assert corpus.source == "75% a, 25% b"
    other = Corpus((parts[0], Part(parts[1].streams, 2.0, "b")), vocab_size=6000)
    assert len({corpus.fingerprint, other.fingerprint, Corpus(parts[:1]).fingerprint}) == 3


@pytest.mark.parametrize("num_rows", [2, 5, 32, 100])
def test_validation_weighs_rows_alike(num_rows):
    """The last row was read once, and others up to 31 times."""
    corpus = Corpus((Part((replace(numbered(num_rows * 10 + 1), is_split=False),), 1.0, ""),), vocab_size=2000)
    rows = unmarked(np.concatenate(corpus.validation_batches(4, 8, 10)))[:, 0]
    _, counts = np.unique(rows, return_counts=True)
    assert len(counts) == min(num_rows, 32)
    assert counts.max() - counts.min() <= 1


@pytest.fixture
def corpus():
    """Return a corpus of text and conversations in one part, and text in another."""
    talks = Conversations.of(some([5, 9, 16, 3] * 5))
    parts = Part((numbered(400), talks), 3.0, ""), Part((numbered(300, 400),), 1.0, "")
    return Corpus(parts, vocab_size=80_000)


def batches(corpus, rows):
    return Batches(corpus, seed=7, batch_size=8, sequence_length=16, rows=rows)


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_processes_read_their_rows_of_the_same_batches_and_go_on_in_other_numbers(corpus, num_processes):
    want = [corpus.batch(7, step, 8, 16) for step in range(1, 7)]
    with batches(corpus, range(8)) as before:
        for batch in want[:2]:
            np.testing.assert_array_equal(next(before), batch)
        state = json.loads(json.dumps(before.state()))
    per_process = 8 // num_processes
    for process in range(num_processes):
        rows = range(process * per_process, (process + 1) * per_process)
        with batches(corpus, rows) as mine:
            mine.restore(state)
            for batch in want[2:]:
                np.testing.assert_array_equal(next(mine), batch[rows.start : rows.stop])
            assert mine.state() == {"sequences": 6 * 8}


def test_a_process_reads_no_row_of_another(monkeypatch):
    read = []
    cut = StreamRows.__getitem__
    monkeypatch.setattr(StreamRows, "__getitem__", lambda rows, i: read.append(i) or cut(rows, i))
    text = Corpus((Part((numbered(400),), 1.0, ""),), vocab_size=400)
    with batches(text, [2, 5]) as mine:
        next(mine)
    assert 2 <= len(read) <= 2 * 10


def test_another_state_is_refused(corpus):
    with batches(corpus, [0]) as mine, pytest.raises(ValueError, match=r"data state is {'next': 1}; expected"):
        mine.restore({"next": 1})


def test_rows_become_the_batch(corpus):
    sharding = batch_sharding(make_mesh(ParallelConfig(2, 4)))
    rows = rows_here(sharding, 16)
    assert rows == list(range(16))
    batch = corpus.batch(0, 1, 16, 16)
    placed = place_rows(batch[rows], sharding, 16)
    assert placed.sharding == sharding
    np.testing.assert_array_equal(placed, batch)
    assert jax.device_get(placed.addressable_shards[3].data).shape == (2, 17)


def test_shortest_text_that_works_has_one_window():
    corpus = Corpus.of_text(bytes(range(200)) * 2, "")
    corpus.check_length(39)
    assert corpus.validation_batches(1, 2, 39)[0].shape == (2, 40)
    with pytest.raises(ValueError, match=r"40 validation bytes .*more than sequence_length 40"):
        corpus.check_length(40)


def test_unigram_entropy():
    assert Corpus.of_text(b"a" * 100, "").unigram_entropy_nats == 0
    assert Corpus.of_text(b"a" * 90 + b"abcde" * 2, "").unigram_entropy_nats == pytest.approx(np.log(5))
    assert 2.5 < default_corpus(1_500_000).unigram_entropy_nats < 4


def test_default_text_is_bounded():
    corpus = default_corpus(1_500_000)
    assert corpus.length(False) + corpus.length(True) == 1_500_000
    assert b"import" in corpus.parts[0].streams[0].tokens.tobytes()


def tokens_of(corpus):
    return [stream.tokens.tolist() for part in corpus.parts for stream in part.streams]


def test_folders_are_read_in_order_without_what_is_hidden(tmp_path):
    (tmp_path / "b").mkdir()
    lines = [json.dumps({"text": "2"}), "", json.dumps({"text": "é", "id": 1})]
    for name, text in [("b/2.txt", "3"), ("a.jsonl", "\n".join(lines)), ("a.txt", "1"), (".git", "no")]:
        (tmp_path / name).write_text(text)
    np.save(tmp_path / "c.npy", np.arange(6, dtype=np.uint16).reshape(2, 3))
    corpus = corpus_from([tmp_path])
    assert tokens_of(corpus) == [[ord("2"), *"é".encode(), ord("1"), ord("3")], [0, 1, 2, 3, 4, 5]]
    text, array = corpus.parts[0].streams
    assert text.starts.tolist() == [1, 3, 4]
    assert array.starts.tolist() == [3]
    assert isinstance(array.tokens.base, np.memmap) or isinstance(array.tokens, np.memmap)
    assert corpus.source == f"4 files of {tmp_path}"
    assert corpus.unit == "token"


def test_weights_are_behind_a_colon(tmp_path):
    for name in ("a", "b:2"):
        (tmp_path / name).write_text(name * 50)
    a, b = tmp_path / "a", tmp_path / "b:2"
    assert len(corpus_from([a, b]).parts) == 1
    assert [part.weight for part in corpus_from([f"{a}:0.5", f"{b}:3"]).parts] == [0.5, 3.0]
    with pytest.raises(ValueError, match="b:2', without a weight; expected one for all paths or for none"):
        corpus_from([f"{a}:1", b])


@pytest.fixture
def tokenizer(tmp_path):
    """Return a tokenizer with words of one letter, and one of two."""
    words = {"a": 0, "b": 1, "ab": 2, "c": 5}
    tokenizer = Tokenizer(models.BPE(words, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return TokenizerFile(tmp_path / "tokenizer.json")


def test_validation_data_are_not_among_the_training_data(tmp_path):
    folder, other = tmp_path / "data", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    for file in (folder / "a", folder / "b", other / "c"):
        file.write_text("text")
    check_held_out([f"{folder}:1", f"{tmp_path / 'data' / 'a'}:2"], str(other))
    (other / "link").symlink_to(folder / "b")
    for validation in (folder, folder / "b", tmp_path / "other" / ".." / "data", other):
        with pytest.raises(ValueError, match=r"data.validation is .*; expected held-out files, but '.*data/[ab]' is"):
            check_held_out([f"{folder}:1"], str(validation))


def test_a_tokenizer_file_gives_the_vocabulary(tmp_path, tokenizer):
    (tmp_path / "text").write_text("abc " * 50)
    corpus = corpus_from([tmp_path / "text"], tokenizer)
    assert tokens_of(corpus) == [[2, 5] * 50]
    assert (corpus.vocab_size, corpus.unit) == (6, "token")
    assert corpus_from([tmp_path / "text"], tokenizer, vocab_size=8).vocab_size == 8
    with pytest.raises(ValueError, match="vocab_size is 5; expected at least the 6 of the tokenizer"):
        corpus_from([tmp_path / "text"], tokenizer, vocab_size=5)


BAD = {
    "float.npy": (np.ones(9, np.float32), "whose dtype is float32; expected integers"),
    "cube.npy": (np.ones((2, 2, 2), int), r"whose shape is \(2, 2, 2\); expected \[tokens\] or"),
    "object.npy": (np.array([None]), "which is not a NumPy array; expected one of integers"),
    "text.npy": (b"text", "which is not a NumPy array; expected one of integers"),
    "negative.npy": (np.array([0, 1, -2]), "whose token 2 is -2; expected 0 to 255, as the vocabulary has 256 words"),
    "beyond.npy": (np.array([0, 256, 1]), "whose token 1 is 256; expected 0 to 255"),
    "none.npy": (np.zeros(0, int), "which contains no bytes; expected text"),
    "cut.jsonl": (b'{"text": "a"}\n{"text": "b', "whose line 2 is not valid JSON; expected an object with the field"),
    "bytes.jsonl": (b"\xff\xfe", "whose line 1 is not valid JSON"),
    "other.jsonl": (b'\n{"words": "a"}', "whose line 2 lacks the field 'text'; expected"),
    "list.jsonl": (b"[1]", "whose line 1 lacks the field 'text'"),
    "number.jsonl": (b'{"text": 3}', "whose line 1 has 3 in 'text'; expected a string"),
    "weight": (b"a" * 99, "with weight 0; expected a finite number above 0", ":0"),
    "nan": (b"a" * 99, "with weight nan; expected", ":nan"),
    "no weight": (b"a" * 99, "which does not exist; expected", ":one"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_refused_in_one_line(tmp_path, name):
    content, message, *weight = BAD[name]
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        np.save(tmp_path / name, content, allow_pickle=True)
    with pytest.raises(ValueError, match=rf"\Adata is '{tmp_path / name}.*{message}.*\Z"):
        corpus_from([f"{tmp_path / name}{''.join(weight)}"])


def test_a_bad_tokenizer_is_refused_in_one_line(tmp_path):
    (tmp_path / "text").write_text("text")
    for path, message in [(tmp_path / "missing", "cannot be read"), (tmp_path / "text", "is not a tokenizer")]:
        with pytest.raises(ValueError, match=message):
            corpus_from([tmp_path / "text"], TokenizerFile(path))


@pytest.mark.parametrize("name", ["text", "lines.jsonl", "array.npy"])
def test_an_unreadable_file_is_refused_in_one_line(tmp_path, monkeypatch, name):
    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / name).write_text("text")
    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(ValueError, match=f"{name}'; expected a readable file: Permission denied$"):
        corpus_from([tmp_path / name])
