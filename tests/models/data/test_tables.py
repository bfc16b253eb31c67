"""Parquet files and folders of `datasets` as data."""

import importlib.util
import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jax_moe_lb.core import FileLimits
from jax_moe_lb.core.file_limits import LimitError
from models.data.sources import corpus_from, table_rows
from models.data.tokenizers import TokenizerFile
from tests.models.data.test_chat import TALK, TEMPLATE, chat_of, folder

__all__ = ["folder"]
TEXTS = [f"document {number}. " * 5 for number in range(40)]


def write_parquet(path, rows, **options):
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, **options)


def write_dataset(path, rows):
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).save_to_disk(path, num_shards=2)


def test_rows_are_the_documents_of_json_lines(tmp_path):
    rows = [{"text": text, "n": number} for number, text in enumerate(TEXTS)]
    (tmp_path / "lines.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    write_parquet(tmp_path / "repository" / "train.parquet", rows, row_group_size=7)
    (tmp_path / "repository" / "README.md").write_text("about the data")
    write_dataset(tmp_path / "saved", rows)
    wanted = corpus_from([tmp_path / "lines.jsonl"])
    for name in ("repository", "repository/train.parquet", "saved"):
        found = corpus_from([tmp_path / name])
        assert found.fingerprint == wanted.fingerprint, name
    assert corpus_from([tmp_path / "saved"]).source == f"2 files of {tmp_path / 'saved'}"


def test_rows_are_conversations_without_the_nulls_of_arrow(tmp_path, folder):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}
    talks = [TALK, [TALK[0], call, *TALK[1:]]]
    rows = [{"messages": talk, "tools": [{"name": "add"}]} for talk in talks] * 12
    (tmp_path / "lines.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    write_parquet(tmp_path / "talks.parquet", rows)
    template = TEMPLATE + "{% for message in messages %}{{ message | tojson }}{% endfor %}{{ tools | tojson }}"
    options = {"tokenizer": TokenizerFile(folder / "tokenizer.json"), "chat": chat_of(folder, template)}
    files = (tmp_path / "lines.jsonl", tmp_path / "talks.parquet")
    (lines, tables) = (corpus_from([file], **options).parts[0].streams[0].tokens for file in files)
    np.testing.assert_array_equal(lines, tables)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"words": "a"}], "whose row 1 lacks the field 'text'; expected an object with it, or another text_field"),
        ([{"text": "a"}, {"text": None}], "whose row 2 lacks the field 'text'"),
        ([{"text": 3}], "whose row 1 has 3 in 'text'; expected a string"),
    ],
)
def test_rows_without_text_are_refused(tmp_path, rows, expected):
    write_parquet(tmp_path / "rows.parquet", rows)
    with pytest.raises(ValueError, match=expected):
        corpus_from([tmp_path / "rows.parquet"])


def test_damaged_and_large_files_are_refused_in_one_line(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    write_parquet(path, [{"text": text} for text in TEXTS])
    with pytest.raises(LimitError, match=r"rows\.parquet', with a group of rows of \d+ bytes"):
        list(table_rows(path, FileLimits(array_bytes=100)))
    whole = path.read_bytes()
    for damaged in (b"", whole[:-4], whole[: len(whole) // 2], b"PAR1" + bytes(99) + b"PAR1", bytes(4) + whole[4:-99]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"\Adata is '.*rows\.parquet', which is damaged; expected rows: .+\Z"):
            list(table_rows(path, FileLimits()))
    (tmp_path / "x.arrow").write_bytes(b"not arrow, but text")
    with pytest.raises(ValueError, match="which is damaged"):
        list(table_rows(tmp_path / "x.arrow", FileLimits()))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"which requires datasets; run pip install '\.\[data\]'"):
        list(table_rows(path, FileLimits()))


def test_offsets_beyond_an_arrow_file_are_refused(tmp_path):
    """Arrow maps a file into memory and checks no offsets, so that reading a row would end the process."""
    write_dataset(tmp_path / "saved", [{"text": "abcde"}] * 40)
    (file, _) = sorted((tmp_path / "saved").glob("*.arrow"))
    offsets = np.arange(0, 101, 5, dtype=np.int32)
    assert offsets.tobytes() in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(offsets.tobytes(), (offsets * 2**20).tobytes()))
    with pytest.raises(ValueError, match="which is damaged; expected rows"):
        list(table_rows(tmp_path / "saved", FileLimits()))


def test_folders_of_several_splits_are_refused(tmp_path):
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "dataset_dict.json").write_text("{}")
    for split in ("train", "test"):
        write_dataset(tmp_path / "both" / split, [{"text": "a"}] * 20)
    with pytest.raises(ValueError, match="which has the splits test, train; expected the folder of one"):
        corpus_from([tmp_path / "both"])
    assert corpus_from([tmp_path / "both" / "train"]).length(held_out=False) > 0


def test_other_folders_with_a_state_are_documents(tmp_path):
    """As those of training programs; `datasets` saves a description beside it."""
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "a.txt").write_text("some words " * 40)
    assert corpus_from([tmp_path]).source == f"2 files of {tmp_path}"


def test_indices_of_a_folder_choose_its_rows(tmp_path):
    rows = datasets.Dataset.from_list([{"text": text} for text in TEXTS])
    rows.save_to_disk(tmp_path / "all")
    datasets.load_from_disk(tmp_path / "all").select([3, 1, 3]).save_to_disk(tmp_path / "chosen")
    assert [row["text"] for row in table_rows(tmp_path / "chosen", FileLimits())] == [TEXTS[i] for i in (3, 1, 3)]


def test_rows_have_values_of_python(tmp_path):
    """As arrays of NumPy a template would have other texts; a file may have no group of rows, or no row."""
    deep = {"a": [{"b": [1, 2], "c": True}], "d": 1.5, "e": "text"}
    message = {"role": "user", "content": None, "more": deep}
    rows = [{"messages": [message], "n": 3, "text": f"{i}"} for i in range(2050)]
    write_parquet(tmp_path / "rows.parquet", rows)
    write_dataset(tmp_path / "saved", rows)
    wanted = [{**row, "messages": [{"role": "user", "more": deep}]} for row in rows]
    files = ("rows.parquet", "saved", "saved/data-00000-of-00002.arrow")
    for name, number in zip(files, (2050, 2050, 1025), strict=True):
        found = list(table_rows(tmp_path / name, FileLimits()))
        assert json.dumps(found) == json.dumps(wanted[:number]), name
    table = pa.table({"text": pa.array([], pa.string())})
    pq.write_table(table, tmp_path / "empty.parquet")
    with pq.ParquetWriter(tmp_path / "none.parquet", table.schema):
        pass
    assert not any(list(table_rows(tmp_path / f"{name}.parquet", FileLimits())) for name in ("empty", "none"))
