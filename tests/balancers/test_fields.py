"""Every field of every balancer changes a plan, and is a row of the table of its page, with its default."""

import dataclasses
import itertools
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks.layer.workloads import WORKLOADS
from jax_moe_lb import Topology
from jax_moe_lb.balancers import Chain
from jax_moe_lb.core import Level, plain_plan
from tests.balancers.fields import kinds, made, names_of, values_of

PAGES = Path(__file__).parents[2] / "docs" / "systems"
FIELDS = [(kind, name) for kind in kinds() for name in names_of(kind)]
LEVELS = (Level("node", 2, bytes_per_s=1.0), Level("gpu", 4, bytes_per_s=1.0))
TOPOLOGY = Topology(LEVELS, ranks_per_domain=8, rails_per_node=4, flops_per_s=1.0)

OF_PROGRAMS = {("Exact", "call_host")}
"""Fields that keep all plans on a host."""


def plans(balancer):
    """Return plans with few and with many slots, each with the previous state, and the form of the state."""
    state, found = balancer.init((8, 32)), []
    for workload, slots in itertools.product(WORKLOADS, (5, 8)):
        counts = workload.counts(0, 8, 100, 32, 2)
        plan, state = balancer.rebalance(counts, plain_plan(counts, TOPOLOGY, slots), TOPOLOGY, state)
        found.append(jax.tree.map(np.asarray, plan))
    leaves, form = jax.tree.flatten(found)
    return [leaf.tobytes() for leaf in leaves], form, jax.tree.map(np.shape, state)


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=lambda value: getattr(value, "__name__", value))
def test_every_field_changes_a_plan(kind, name):
    changed = any(plans(made(kind, **{name: value})) != plans(made(kind)) for value in values_of(kind, name))
    assert changed != ((kind.__name__, name) in OF_PROGRAMS)


def rows_of(kind):
    """Return the last cell of each row of the page's tables by the names in its first cell."""
    (page,) = (page for page in PAGES.glob("*.md") if page.stem.replace("_", "") == kind.__name__.lower())
    rows = [line.strip("|").split(" | ") for line in page.read_text().splitlines() if line.startswith("| `")]
    return page.read_text(), {name: row[-1] for row in rows for name in re.findall(r"`(\w+)`", row[0])}


@pytest.mark.parametrize("kind", [kind for kind in kinds() if kind is not Chain], ids=lambda kind: kind.__name__)
def test_the_table_of_a_page_has_every_field_with_its_default(kind):
    text, rows = rows_of(kind)
    assert set(names_of(kind)) <= set(rows)
    assert not (names_of(kind) and "has no parameters" in text)
    for field in dataclasses.fields(kind):
        if field.name in rows and field.default not in (None, dataclasses.MISSING):
            default = str(field.default)
            assert re.search(rf"(?<![\w.]){re.escape(default)}(?![\w.])", rows[field.name]), (field.name, default)
