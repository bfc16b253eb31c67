import numpy as np
import pytest

from models.data import CHUNK_BYTES, CHUNKS_PER_SPLIT, Corpus, corpus_from, default_corpus


def numbered(num_bytes):
    """Text in which every four bytes are their own place, so that a byte can be traced."""
    return np.arange(num_bytes // 4, dtype=np.uint32).tobytes()


@pytest.mark.parametrize("num_bytes", [400, 40_000, 3 * CHUNKS_PER_SPLIT * CHUNK_BYTES])
def test_split_is_disjoint_and_complete(num_bytes):
    text = numbered(num_bytes)
    corpus = Corpus.split(text, "")
    train, validation = corpus.train.view(np.uint32), corpus.validation.view(np.uint32)
    assert not set(train) & set(validation)
    assert len(train) + len(validation) == num_bytes // 4
    assert 0.05 < len(validation) / (num_bytes // 4) < 0.15


def test_split_and_batches_are_deterministic():
    text = numbered(4000)
    corpus, again = Corpus.split(text, ""), Corpus.split(text, "")
    assert corpus.fingerprint == again.fingerprint
    np.testing.assert_array_equal(corpus.batch(3, 7, 8, 16), again.batch(3, 7, 8, 16))
    assert (corpus.batch(3, 7, 8, 16) != corpus.batch(3, 8, 8, 16)).any()
    assert (corpus.batch(3, 7, 8, 16) != corpus.batch(4, 7, 8, 16)).any()


def test_windows_are_of_their_own_part():
    corpus = Corpus.split(b"t" * 360 + b"v" * 40, "")
    assert (corpus.batch(0, 0, 32, 39) == ord("t")).all()
    assert corpus.batch(0, 0, 32, 39).shape == (32, 40)
    batches = corpus.validation_batches(2, 8, 39)
    assert [batch.shape for batch in batches] == [(8, 40)] * 2
    assert (np.stack(batches) == ord("v")).all()


def test_shortest_text_that_works_has_one_window():
    corpus = Corpus.split(numbered(400), "")
    corpus.check_length(39)
    assert corpus.validation_batches(1, 2, 39)[0].shape == (2, 40)
    with pytest.raises(ValueError, match="sequence_length 40"):
        corpus.check_length(40)


def test_unigram_entropy():
    uniform = Corpus(np.zeros(1, np.uint8), np.arange(256, dtype=np.uint8), "")
    assert uniform.unigram_entropy_nats == pytest.approx(np.log(256))
    assert Corpus.split(b"a" * 100, "").unigram_entropy_nats == 0


def test_default_text_is_bounded():
    corpus = default_corpus(1_500_000)
    assert len(corpus.train) + len(corpus.validation) == 1_500_000
    assert b"import" in corpus.train.tobytes()
    assert 2.5 < corpus.unigram_entropy_nats < 4


def test_folders_are_read_in_order_without_what_is_hidden(tmp_path):
    (tmp_path / "b").mkdir()
    for name, text in [("b/2.txt", "two"), ("a.txt", "one"), (".git", "no")]:
        (tmp_path / name).write_text(text * 100)
    corpus = corpus_from([tmp_path])
    whole = Corpus.split(b"one" * 100 + b"two" * 100, "")
    assert corpus.fingerprint == whole.fingerprint
    assert corpus.source.startswith("2 files of")
