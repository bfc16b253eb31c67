"""Documents match the results."""

import re

import pytest

from benchmarks.render.documents import RESULTS, ROOT, changed, documents, old_plots, rendered
from benchmarks.render.marks import MARK, made_by, table_names, tables_like
from benchmarks.render.numbers import BLOCK
from benchmarks.render.results import Table, read, save


@pytest.fixture
def results(tmp_path):
    rows = [["plain", "forward", 2.509], ["exact", "forward", 1.01], ["exact", "both", 1.02]]
    save({"zipf": Table({"system": "", "passes": "", "imbalance": ".2f"}, rows)}, tmp_path / "bench.json")
    return tmp_path


def test_documents_are_what_would_be_rendered():
    assert [str(path) for path, _ in changed()] == []


def test_plots_are_of_these_results():
    assert [str(path) for path, _ in old_plots()] == []


def test_every_table_is_shown_or_linked_or_read_by_the_simulator():
    text = "".join(path.read_text() for path in documents())
    marks = [mark["given"] for mark in MARK.finditer(text) if mark["kind"] == "table"]
    rows = [mark["given"] for mark in MARK.finditer(text) if mark["kind"] == "rows"]
    used = {table for given in rows for table in tables_like(given, read(RESULTS))}
    used |= {table for given in marks for table in table_names(given.partition(" | ")[0])}
    used |= {line for block in BLOCK.finditer(text) for line in block.group().splitlines() if " | " not in line}
    linked = [RESULTS / name for name in set(re.findall(r"benchmarks/results/(\w+\.json)\)", text))]
    used |= {f"{run}/{name}" for path in linked for run, record in read(path).items() for name in record.tables}
    used |= {"network_hybridep/measured", "network_rails/measured"}
    # `network training compare` repeats them beside the measurements.
    used |= {f"network_training_predicted_{number}/predictions" for number in (1, 2, 3)}
    used |= {"network_training_speed_predicted/predictions"}
    assert {f"{run}/{name}" for run, record in read(RESULTS).items() for name in record.tables} <= used


def test_few_bytes_of_the_documents_are_marks():
    """A mark of another kind would not be rendered."""
    marks = {path: re.findall(r"<!--.*?-->", path.read_text(), re.DOTALL) for path in documents()}
    assert sum(len(mark) for found in marks.values() for mark in found) < 10_000
    kinds = {mark.split()[1] for found in marks.values() for mark in found}
    assert kinds == {"table:", "rows:", "include:", "answers:", "numbers", "end"}


def test_results_list_the_answers_of_all_pages_of_results():
    text = (RESULTS.parent / "RESULTS.md").read_text()
    for page in (ROOT / "docs/results").glob("*.md"):
        title, _, body = page.read_text().partition("\n\n")
        assert not body.startswith(("<", "`python", "#", "|", "- ")), f"{page.name} begins with no answer"
        link = rf"\[{re.escape(title[2:])}\]\(../docs/results/{page.name}\)"
        row = re.search(rf"^\| {link} \| (.*) \|$", text, re.MULTILINE)
        assert row, page
        assert " ".join(body.split("\n\n")[0].split())[:30] in row[1].replace("../docs", "..")


HISTORY = re.compile(
    r"load average|\bearlier run\b|\bin a run of 20\d\d|\bcommit [0-9a-f]{7}|\((?=\w*\d)[0-9a-f]{7,10}\)"
)


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.stem)
def test_documents_have_no_history(path):
    if path.parent.name == "results" or path.stem == "RESULTS":
        assert not HISTORY.search(path.read_text())


def test_a_table_replaces_what_stood_between_its_marks(results):
    text = "<!-- table: bench/zipf -->\na former table\n<!-- end -->\nafter"
    once = rendered(text, results)
    assert "| plain | forward | 2.51 |" in once
    assert "a former table" not in once
    assert once.endswith("after")
    assert rendered(once, results) == once


def test_a_mark_has_several_tables_of_a_run(spread_results):
    once = rendered("<!-- table: bench/zipf spread -->\n<!-- end -->", spread_results)
    assert re.search(r"`\n?.*\n\n.*\| plain \| forward \| 2.51 \|\n.*\| plain \| 12.52", once, re.DOTALL)
    assert rendered(once, spread_results) == once


def test_conditions_select_rows(results):
    once = rendered("<!-- table: bench/zipf | system = exact | passes = both or forward -->\n<!-- end -->", results)
    assert once.splitlines()[3:-1] == ["| passes | imbalance |", "|---|---|", "| forward | 1.01 |", "| both | 1.02 |"]
    assert rendered(once, results) == once
    with pytest.raises(ValueError, match="no row with system = greedy"):
        rendered(once.replace("system = exact", "system = greedy"), results)


def test_no_load_average_is_shown(results):
    record = read(results)["bench"]
    assert "load average" in record.machine
    assert "load average" not in made_by(record)
    assert record.machine.split(",")[0] in made_by(record)


def test_what_has_not_run_yet_is_said(results):
    text = "<!-- table: later/even -->\n<!-- end -->"
    assert "Not run yet: `later`" in rendered(text, results)


def test_a_table_that_is_not_there_is_refused(results):
    with pytest.raises(KeyError, match="no table 'even'"):
        rendered("<!-- table: bench/even -->\n<!-- end -->", results)


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
    once = rendered(page, spread_results)
    assert "Compare 12.52 (12.00-13.00) and 2.45." in once
    broken = once.replace("Compare 12.52 (", "Compare 12.52\n  (")
    assert rendered(broken, spread_results) == broken


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
    body = "Run, see [GPU](how-to/gpu.md#a), [words](#words) and [JAX](https://jax.dev).\n"
    (tmp_path / "docs/status.md").write_text(f"# Status\n\n{body}\n## Words\n\nMore.\n\n<!-- numbers\n-->\n")
    text = "Before.\n<!-- include: docs/status.md -->\nold\n<!-- end -->\n"
    once = rendered(text, results, tmp_path)
    links = body.replace("how-to/", "docs/how-to/").replace("#words", "docs/status.md#words")
    assert once == text.replace("old", links.strip())
    assert rendered(once, results, tmp_path) == once
