import base64
import re
import types
from pathlib import Path

import pytest

from models.run_folder.metrics import RunFolder
from models.run_folder.report import PAGE, LiveReport

pytestmark = pytest.mark.slow


@pytest.mark.thorough
def test_report_needs_nothing_else(trained_run):
    page = RunFolder(trained_run).report.read_text()
    assert not re.search(r"https?://|<link|<script|<iframe|@import|url\(", page)
    sources = re.findall(r'src="([^"]*)"', page)
    images = [base64.b64decode(source.removeprefix("data:image/png;base64,"), validate=True) for source in sources]
    assert len(set(images)) == 6
    assert all(image.startswith(b"\x89PNG") for image in images)


def test_report_has_the_logo_of_the_site():
    logo = (Path(__file__).parents[3] / "docs/logo.svg").read_text()
    shapes = re.findall(r"<(?:rect|path) [^>]*/>", logo)
    assert len(shapes) > 2
    assert all(shape in PAGE.template for shape in shapes)


@pytest.mark.thorough
def test_report_states_the_result(trained_run):
    folder = RunFolder(trained_run)
    page, validation = folder.report.read_text(), folder.rows("validation")
    headline = re.search(r"<h1>(.*?)</h1>", page).group(1)
    assert f"Validation loss after 8 steps is {validation[-1]['loss']:.2f} nats" in headline
    assert "load of 8 ranks" in headline
    words = ("commit", "unused experts", "replication", "unigram entropy [nats]", "learning rate", "jaxlib", "a fox")
    assert not [word for word in (*words, "imbalance after") if word not in page]


def test_a_report_of_a_long_run_is_written_less_often(monkeypatch):
    """A report reads all rows and counts of the run."""
    seconds, written = [0.0], []

    def write(folder, summary):
        written.append(seconds[0])
        seconds[0] += 10

    monkeypatch.setattr("models.run_folder.report.time", types.SimpleNamespace(monotonic=lambda: seconds[0]))
    monkeypatch.setattr("models.run_folder.report.summarise", lambda folder: {})
    monkeypatch.setattr("models.run_folder.report.write_report", write)
    live = LiveReport(types.SimpleNamespace(rows=lambda kind: [{}]), {})
    while seconds[0] < 600:
        live.update()
        seconds[0] += 1
    assert written == [60, 270, 480]
