"""Documents match the results."""

import re

import pytest

from benchmarks.gpu.step_cases import CASES
from benchmarks.page_numbers import BLOCK
from benchmarks.render import RESULTS, TABLE, VALUE, changed, documents, made_by, old_plots, rendered, tables_of
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
    used = {table for match in TABLE.finditer(text) for table in tables_of(match)}
    used |= {match["path"].split(" > ")[0] for match in VALUE.finditer(text)}
    used |= {line for block in BLOCK.finditer(text) for line in block.group().splitlines() if " | " not in line}
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


def test_a_mark_has_several_tables_of_a_run(spread_results):
    once = rendered("<!-- table: bench/zipf spread -->\n<!-- /table -->", spread_results)
    assert re.search(r"`\n?.*\n\n.*\| plain \| forward \| 2.51 \|\n.*\| plain \| 12.52", once, re.DOTALL)
    assert rendered(once, spread_results) == once


def test_no_load_average_is_shown(results):
    record = read(results)["bench"]
    assert "load average" in record.machine
    assert "load average" not in made_by(record)
    assert record.machine.split(",")[0] in made_by(record)


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


PAGE = """# Title

From 2.4 to
  1.009 times the mean, and 1.02 (old) with both. Compare 12.4 and 2.45.

<!-- numbers
bench/zipf
From {2.4} to {1.009} times | plain > imbalance | exact > forward > imbalance
and {1.02} (old) | exact > both > imbalance
bench/spread
Compare {12.4} and | plain > ms
-->
"""


@pytest.fixture
def spread_results(results):
    read_back = {"zipf": read(results)["bench"].tables["zipf"]}
    read_back["spread"] = Table({"system": "", "ms": ".2f"}, [["plain", [12.52, 12.0, 13.0]]])
    save(read_back, results / "bench.json")
    return results


def test_numbers_of_a_page_are_updated_in_sentences_and_block(spread_results):
    once = rendered(PAGE, spread_results)
    assert "From 2.5 to\n  1.010 times the mean, and 1.02 (old) with both. Compare 12.5 and 2.45." in once
    assert "From {2.5} to {1.010} times | plain > imbalance | exact > forward > imbalance\n" in once
    assert rendered(once, spread_results) == once


def test_a_number_with_a_range_is_the_text_of_the_cell(spread_results):
    page = PAGE.replace("12.4", "12.40 (12.00-13.00)")
    assert "Compare 12.52 (12.00-13.00) and 2.45." in rendered(page, spread_results)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("with both", "with both; Compare 12.4 and", "occurs 2 times"),
        ("and 1.02 (old)", "and 1.03 (old)", "occurs 0 times"),
        ("Compare 12.4 and", "Compare 112.4 and", "occurs 0 times"),
        ("{1.02} (old)", "{1.02} ({old})", "has 1 paths"),
        ("plain > ms", "plain > ns", "expected one row, one column"),
        ("bench/spread", "bench/other", "no table 'other'"),
    ],
    ids=lambda text: text[:12],
)
def test_a_page_without_a_phrase_or_cell_is_refused(spread_results, old, new, error):
    assert old in PAGE
    with pytest.raises((KeyError, ValueError), match=error):
        rendered(PAGE.replace(old, new, 1), spread_results)


def test_an_include_has_the_body_of_a_page_with_its_links(tmp_path, results):
    (tmp_path / "docs").mkdir()
    body = "Run, see [GPU](how-to/gpu.md#a) and [JAX](https://jax.dev).\n"
    (tmp_path / "docs/status.md").write_text(f"# Status\n\n{body}\n<!-- numbers\n-->\n")
    text = "Before.\n<!-- include: docs/status.md -->\nold\n<!-- /include -->\n"
    once = rendered(text, results, tmp_path)
    assert once == text.replace("old", body.replace("how-to/", "docs/how-to/").strip())
    assert rendered(once, results, tmp_path) == once
