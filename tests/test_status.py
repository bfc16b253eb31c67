"""Only `docs/status.md` says which hardware ran; other pages and sources include or link it."""

import re
from pathlib import Path

import pytest

from benchmarks.render.numbers import NOT_PROSE
from ci.words import texts

ROOT = Path(__file__).parents[1]
STATUS = ROOT / "docs/status.md"
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
SOURCES = [
    path
    for folder in ("jax_moe_lb", "models", "ffi", "benchmarks", "examples", "tests")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".cc", ".h", ".cu"} and path != Path(__file__)
]

HARDWARE = re.compile(
    r"\b(GPUs?|TPUs?|[ABH]\d00s?|v5e|NVLink|CUDA|accelerators?|hardware|clusters?|these devices)\b", re.I
)
RUN = r"\b(ran|executed|measured|measurements?|(has|have|was|were|been) run)\b"
NOT = r"\b(no|none|never|not|nothing|yet)\b"
DENIED = re.compile(rf"{NOT}.*{RUN}|{RUN}.*{NOT}|(?<!does )(?<!do )\b(not|never|no) run\b", re.I)
SENTENCE = re.compile(r"(?<=[.!?:;])\s+|\n\s*\n|\n\s*(?=[-*>|]|\d+\. )")


def statuses(text):
    """Yield sentences that deny a run on some hardware."""
    without_code = re.sub(r"^ *(```|~~~).*?^ *\1", "\n", text, flags=re.DOTALL | re.MULTILINE)
    for sentence in SENTENCE.split(without_code):
        one_line = " ".join(sentence.split())
        if HARDWARE.search(one_line) and DENIED.search(one_line):
            yield one_line


def test_no_page_has_a_status_of_its_own():
    found = {path: list(statuses(NOT_PROSE.sub("", path.read_text()))) for path in PAGES if path != STATUS}
    assert not {str(path.relative_to(ROOT)): own for path, own in found.items() if own}, "link docs/status.md instead"


@pytest.mark.slow
def test_no_source_has_a_status_of_its_own():
    found = {path: [own for _, text in texts(path) for own in statuses(text)] for path in SOURCES}
    assert not {str(path.relative_to(ROOT)): own for path, own in found.items() if own}, "see docs/status.md"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_first_pages_include_the_status(page):
    row = next(line for line in STATUS.read_text().splitlines() if line.startswith("| TPU |"))
    assert row in (ROOT / page).read_text()


@pytest.mark.parametrize(
    "text",
    [
        "None of the CUDA and TPU forms has run on an accelerator yet; tests compile them.",
        "GPU and TPU programs are\ncompiled; none has run on these devices.",
        "Numbers are below. None was measured on a GPU.",
        "It helps accelerators, on which **no measurement was made**.",
        "| TPU | **compiled**, not run | all systems |",
        "There is no measurement of an H100.",
    ],
)
def test_statuses_are_found(text):
    assert list(statuses(text))


@pytest.mark.parametrize(
    "text",
    [
        "On a GPU the host runs the planner and does not wait.",
        "Programs compiled for a TPU.",
        "No token is dropped on GPUs.\n\nIt ran in one minute.",
        "```\nnone has run on a GPU\n```\n",
    ],
)
def test_other_sentences_are_not(text):
    assert not list(statuses(text))
