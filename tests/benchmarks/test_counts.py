"""Counts in results that are cheap to compute are recomputed and compared with the documents."""

import pytest

from benchmarks.papers import feplb, rails, sim_feplb, sim_hybridep, sim_networks, ultraep
from benchmarks.papers.stragglers import CASES as STRAGGLERS
from benchmarks.papers.stragglers import counts as straggler_counts
from benchmarks.papers.stragglers import sampled
from benchmarks.plans.popular_ranks import CASES
from benchmarks.plans.popular_ranks import counts as ultraep_counts
from benchmarks.render.documents import RESULTS
from benchmarks.render.results import load
from jax_moe_lb.balancers import FEPLB


def kept(name, table, *first):
    """Return the row of a stored table with these first cells."""
    (row,) = (row for row in load(RESULTS / f"{name}.json")[table].rows if tuple(row[: len(first)]) == first)
    return row[len(first) :]


def counted(*values):
    """Approximate means over random loads; other NumPy releases sample differently (2.4 and 2.5 differ by 0.3 %)."""
    return pytest.approx(values, rel=0.02)


@pytest.mark.slow
def test_ultraeps_imbalance_replicas_and_remote_rows():
    loads = ultraep_counts(CASES[-1], 0)
    _, after = ultraep.planned(CASES[-1], loads)
    last = load(RESULTS / "ultraep.json")["cases"].rows[-1]
    assert last[4:9] == counted(*ultraep.planned_row(after, loads))


def test_feplbs_and_fastermoes_token_stragglers_on_8_ranks():
    loads = straggler_counts(STRAGGLERS[-1], 0, 2000)
    before = feplb.plain(loads)
    plans = feplb.fastermoe(loads), feplb.feplb(loads)
    cuts = [feplb.reduction(plan, before) for plan in plans]
    assert kept("feplb", "ranks", 8, "here")[1:3] == counted(*cuts)


@pytest.mark.parametrize("popularity", ["as on 8 ranks", "continued to 16"])
def test_feplbs_held_out_token_stragglers_on_16_ranks(popularity):
    width, before, *cuts = kept("sim_feplb", "held_out", popularity)[:4]
    loads = sampled(16, width, 0, sim_feplb.HELD_OUT_MICROBATCHES, 16384)
    plain = feplb.plain(loads)
    again = [feplb.reduction(feplb.feplb(loads, FEPLB(tau=tau)), plain) for tau in (1, 1792)]
    assert [before, *cuts] == counted(feplb.straggler(plain).mean(), *again)


def test_how_even_rails_are():
    found = [rails.over_bound(rails.PLANS["RailS"], sparsity) for sparsity in (0, 0.8)]
    assert kept("rails", "plans", "RailS")[:4] == counted(*(number for one in found for number in one[:2]))


@pytest.mark.slow
def test_simulated_bytes_of_the_measured_networks():
    again = sim_networks.tables(sim_networks.RESULTS)
    for name, table in load(RESULTS / "sim_networks.json").items():
        assert table.cells() == again[name].cells()


def test_simulated_domain_sizes_of_table_iv():
    again = sim_hybridep.table_iv()
    assert all(row.simulated == row.published for row in again.rows)
    assert load(RESULTS / "sim_hybridep.json")["table_iv"].cells() == again.table().cells()
