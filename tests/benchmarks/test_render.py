"""Documents match the results."""

import pytest

from benchmarks.gpu.step_cases import CASES
from benchmarks.render import RESULTS, TABLE, VALUE, changed, documents, old_plots, rendered
from benchmarks.results import Table, read, save


@pytest.fixture
def results(tmp_path):
    rows = [["plain", "forward", 2.509], ["exact", "forward", 1.01], ["exact", "both", 1.02]]
    save({"zipf": Table({"system": "", "passes": "", "imbalance": ".2f"}, rows)}, tmp_path / "bench.json")
    return tmp_path


def test_documents_are_what_would_be_rendered():
    assert [str(path) for path, _ in changed()] == []


def test_plots_are_of_these_results():
    assert [str(path) for path, _ in old_plots()] == []


def test_every_table_is_shown_or_read_by_the_simulator():
    text = "".join(path.read_text() for path in documents())
    used = {match["name"] for match in TABLE.finditer(text)}
    used |= {match["path"].split(" > ")[0] for match in VALUE.finditer(text)}
    used |= {"network_hybridep/measured", "network_rails/measured"}
    # `bench_training compare` repeats them beside the measurements.
    used |= {f"network_training_predicted_{number}/predictions" for number in (1, 2, 3)}
    # `make gpu` repeats them beside the measurements.
    used |= {f"bench_predicted_steps_{name}/steps" for name in CASES}
    assert {f"{run}/{name}" for run, record in read(RESULTS).items() for name in record.tables} <= used


def test_claims_are_values():
    assert len(list(VALUE.finditer((RESULTS.parent / "RESULTS.md").read_text()))) > 20


def test_a_table_replaces_what_stood_between_its_marks(results):
    text = "<!-- table: bench/zipf -->\nold\n<!-- /table -->\nafter"
    once = rendered(text, results)
    assert "| plain | forward | 2.51 |" in once
    assert "old" not in once
    assert once.endswith("after")
    assert rendered(once, results) == once


def test_a_value_is_the_cell_of_the_one_row_that_has_all_texts(results):
    text = "<!-- value: bench/zipf > exact > both > imbalance --><!-- /value -->"
    assert "-->1.02<!--" in rendered(text, results)


@pytest.mark.parametrize("path", ["exact > imbalance", "greedy > imbalance", "exact > both > rounds"])
def test_a_value_that_is_not_one_cell_is_refused(results, path):
    with pytest.raises(KeyError, match="expected one row, one column"):
        rendered(f"<!-- value: bench/zipf > {path} --><!-- /value -->", results)


def test_what_has_not_run_yet_is_said(results):
    text = "<!-- table: later/even -->\n<!-- /table -->"
    assert "Not run yet: `later`" in rendered(text, results)


def test_a_table_that_is_not_there_is_refused(results):
    with pytest.raises(KeyError, match="no table 'even'"):
        rendered("<!-- table: bench/even -->\n<!-- /table -->", results)
