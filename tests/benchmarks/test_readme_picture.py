"""The picture of the README shows loads of the library."""

import re

import numpy as np
import pytest

from benchmarks.readme_picture import FOLDER, HEADROOM, THEMES, draw, loads


@pytest.fixture(scope="module")
def both():
    return loads()


def test_the_loads_after_balancing_fit_the_receive_buffer(both):
    before, after = both
    assert np.mean(before) == pytest.approx(1)
    assert np.mean(after) == pytest.approx(1)
    assert after.max() < HEADROOM < 2 < before.max()


@pytest.mark.parametrize("theme", THEMES)
def test_the_stored_picture_shows_these_loads(both, theme):
    stored, drawn = (FOLDER / f"load-{theme}.svg").read_text(), draw(*both, THEMES[theme])
    assert len(stored) < 100_000
    # Coordinates depend on the version of matplotlib and its fonts; texts do not.
    texts = [re.findall(r"<text [^>]*>(.*?)</text>", one) for one in (stored, drawn)]
    assert texts[0] == texts[1]
    assert f"busiest rank {both[0].max():.2f} x mean" in stored
    assert f"busiest rank {both[1].max():.2f} x mean" in stored
    assert drawn == draw(*both, THEMES[theme])
