"""Tables of results: Markdown output, storage and loading."""

import argparse
import json
from unittest.mock import Mock

import numpy as np
import pytest

from benchmarks.render.documents import RESULTS
from benchmarks.render.results import Table, load, merge, picture_file, read, save, spread, tables_file


def test_a_median_has_its_range_behind_it():
    table = Table({"ranks": "d", "ms": ".1f", "note": ""}, [[8, spread(np.array([1, 3, 2.0])), None]])
    assert str(table).splitlines()[-1] == "| 8 | 2.0 (1.0-3.0) |  |"


def test_what_was_kept_is_read_again(tmp_path):
    tables = {"steps": Table({"ranks": "d", "ms": ".1f"}, [[8, [2.0, 1.0, 3.0]], [16, [4.0, 3.5, 5.0]]])}
    save(tables, tmp_path / "found.json")
    assert str(load(tmp_path / "found.json")["steps"]) == str(tables["steps"])
    kept = json.loads((tmp_path / "found.json").read_text())["found"]
    assert {"command", "commit", "date", "machine", "software"} < kept.keys()


def test_a_table_without_rows_is_read_again(tmp_path):
    save({"a": Table({"n": "d"}, [])}, tmp_path / "found.json")
    assert load(tmp_path / "found.json") == {"a": Table({"n": "d"})}


def test_a_process_that_is_killed_while_it_writes_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "found.json"
    save({"a": Table({"n": "d"}, [[1]])}, path)
    monkeypatch.setattr("pathlib.Path.replace", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save({"a": Table({"n": "d"}, [[2]])}, path)
    assert load(path)["a"].rows == [[1]]
    assert list(read(tmp_path)) == ["found"]


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="a row has 1 values, expected 2"):
        Table({"a": "", "b": ""}, [[1]])


@pytest.mark.parametrize(
    ("value", "form", "stored"),
    [
        (1.0790194996310496, ".2f", 1.079),
        (0.12345678, ".1%", 0.1235),
        (123456.7, ".0f", 123457.0),
        (1234567.0, ".3g", 1234600.0),
        (1.23496, ".2f", 1.23496),
        (1.23456, "", 1.23456),
        ([2.01234, 1.04999, 3.09], ".1f", [2.012, 1.04999, 3.09]),
        (7, "d", 7),
        (float("inf"), ".2f", float("inf")),
    ],
)
def test_numbers_have_the_digits_that_are_shown(tmp_path, value, form, stored):
    save({"one": Table({"a": form}, [[value]])}, tmp_path / "found.json")
    table = load(tmp_path / "found.json")["one"]
    assert table.rows == [[stored]]
    assert table.cells() == Table({"a": form}, [[value]]).cells()


def test_a_row_is_a_line(tmp_path):
    rows = [[8, [2.0, 1.0, 3.0], "π"], [16, None, "b"]]
    save({"steps": Table({"ranks": "d", "ms": ".1f", "": ""}, rows, notes=["one", "two"])}, tmp_path / "found.json")
    lines = [line.strip() for line in (tmp_path / "found.json").read_text().splitlines()]
    assert {'[8, [2.0, 1.0, 3.0], "π"],', '[16, null, "b"]', '"one",', '"two"'} < set(lines)
    assert '"columns": {"ranks": "d", "ms": ".1f", "": ""},' in lines


def names_in(path):
    return {name: list(record.tables) for name, record in read(path).items()}


def test_runs_of_one_benchmark_share_a_file(tmp_path):
    long, quick, both = (tmp_path / f"{name}.json" for name in ("long", "quick", "both"))
    tables = {"a": Table({"n": "d"}, [[1]]), "b": Table({"n": "d"}, [[2]])}
    save(tables, long)
    save(tables, quick)
    merge(long, both)
    merge(quick, both)
    assert not long.exists()
    assert names_in(both) == {"long": ["a", "b"], "quick": ["a", "b"]}
    save({"b": tables["b"]}, long)
    with pytest.raises(ValueError, match="run long is in"):
        read(tmp_path)
    merge(long, both)
    assert names_in(tmp_path) == {"long": ["b"], "quick": ["a", "b"]}


def test_a_digest_is_that_of_the_tables(tmp_path):
    found = tmp_path / "found.json"
    save({"a": Table({"n": ".1f"}, [[1.23456]])}, found)
    first = read(found)["found"].digest
    save({"a": Table({"n": ".1f"}, [[1.2349]])}, found)
    assert read(found)["found"].digest == first
    save({"a": Table({"n": ".1f"}, [[1.236]])}, found)
    assert read(found)["found"].digest != first


def test_all_results_are_small_enough_to_read():
    assert sum(len(path.read_text().splitlines()) for path in RESULTS.glob("*.json")) < 4600
    assert max(len(line) for path in RESULTS.glob("*.json") for line in path.read_text().splitlines()) < 2000


@pytest.mark.parametrize("option", ["--compiled {0} --out {0}", "--out={0} --loads {0}", "--loads {0} --out={1}"])
@pytest.mark.parametrize("kind", [tables_file, picture_file])
def test_an_output_that_is_an_argument_is_refused(kind, option, tmp_path, monkeypatch):
    path, linked = tmp_path / "loads.npy", tmp_path / "linked.npy"
    path.write_bytes(b"recorded")
    linked.symlink_to(path)
    words = option.format(path, linked).split()
    monkeypatch.setattr("sys.argv", ["bench", *words])
    out = linked if str(linked) in option.format(path, linked) else path
    with pytest.raises(argparse.ArgumentTypeError, match="expected another path than argument"):
        kind(str(out))
    assert path.read_bytes() == b"recorded"


@pytest.mark.parametrize("content", [b"import numpy\n", b"[1]", b'{"mine": 1}', b"\x93NUMPY\x01"])
def test_a_file_without_tables_is_kept(content, tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(content)
    monkeypatch.setattr("sys.argv", ["bench", "--out", str(path)])
    with pytest.raises(argparse.ArgumentTypeError, match="is no file of tables; expected a new file, or one"):
        tables_file(str(path))
    with pytest.raises(argparse.ArgumentTypeError, match=r"an existing file; expected a new file, or a \.png file"):
        picture_file(str(path))


def test_tables_and_new_files_may_be_written(tmp_path, monkeypatch):
    path = tmp_path / "bench_x.json"
    monkeypatch.setattr("sys.argv", ["bench", "--out", str(path)])
    assert tables_file(str(path)) == path
    save({"one": Table({"a": "d"}, [[1]])}, path)
    assert tables_file(str(path)) == path
