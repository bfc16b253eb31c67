"""Tables of results: written as Markdown, kept and read again."""

import json

import numpy as np
import pytest

from benchmarks.results import Table, load, save, spread


def test_a_median_has_its_range_behind_it():
    table = Table({"ranks": "d", "ms": ".1f", "note": ""}, [[8, spread(np.array([1, 3, 2.0])), None]])
    assert str(table).splitlines()[-1] == "| 8 | 2.0 (1.0-3.0) |  |"


def test_what_was_kept_is_read_again(tmp_path):
    tables = {"steps": Table({"ranks": "d", "ms": ".1f"}, [[8, [2.0, 1.0, 3.0]], [16, [4.0, 3.5, 5.0]]])}
    save(tables, tmp_path / "found.json")
    assert str(load(tmp_path / "found.json")["steps"]) == str(tables["steps"])
    kept = json.loads((tmp_path / "found.json").read_text())
    assert {"command", "commit", "date", "machine", "software"} < kept.keys()


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="a row has 1 values, expected 2"):
        Table({"a": "", "b": ""}, [[1]])
