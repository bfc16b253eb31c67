"""The programs of every how-to page run as they stand."""

import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(page for page in (ROOT / "docs" / "how-to").glob("*.md") if "```python" in page.read_text())
PAGES += [ROOT / "docs" / "models.md"]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_programs_of_a_page_run(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    program = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    # What users have by default; the other tests are stricter.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(program, str(page), "exec"), {"__name__": "__main__"})
