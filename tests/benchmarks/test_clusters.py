"""The smallest cluster is the first that fits; clusters too small for the state are not compiled for."""

import argparse
import dataclasses

import pytest

from benchmarks.compiled import smallest_cluster as clusters
from jax_moe_lb.aot import ProgramReport
from jax_moe_lb.aot.collectives import ProgramCollective
from models.dry_run.step import published_run

GB = 10**9
STATE_BYTES = 512 * GB
"""State size over all devices."""

REPORT = ProgramReport(
    target="h100:1x8",
    devices=8,
    argument_bytes=35 * GB,
    output_bytes=0,
    temp_bytes=25 * GB,
    peak_bytes=25 * GB,
    memory_bytes=85 * GB,
    buffers=(),
    flops=129,
    ideal_flops=100,
    hbm_bytes=0,
    operations=(),
    collectives=tuple(
        ProgramCollective(kind, axes, 1, 2 * GB, 0, ())
        for kind, axes in (("all-gather", ("data",)), ("reduce-scatter", ("data",)), ("all-reduce", None))
    ),
    custom_calls={},
    host_waits=64,
    compile_s=1.0,
)


@pytest.fixture
def compiled(monkeypatch):
    """Record the compiled targets; a target fits if its devices hold at most 20 GB of the state."""
    targets = []

    def compile_for(run, target):
        targets.append(target.name)
        share = STATE_BYTES // run.parallel.num_shards
        return dataclasses.replace(REPORT, target=target.name, argument_bytes=share, temp_bytes=65 * GB)

    monkeypatch.setattr(clusters, "dry_run", compile_for)
    monkeypatch.setattr(clusters, "state_bytes", lambda run, target: STATE_BYTES // run.parallel.num_shards)
    monkeypatch.setattr(clusters, "use_no_accelerators", lambda: None)
    monkeypatch.setattr(clusters, "MODELS", ("mixtral-8x7b",))
    return targets


def test_the_first_that_fits_is_found(compiled):
    run, report = clusters.smallest("mixtral-8x7b", "h100")
    assert report.target == "h100:4x8"
    assert (run.parallel.data_parallel, run.parallel.system) == (4, "exact")
    # One node is too small for parameters, moments and gradients.
    assert compiled == ["h100:2x8", "h100:4x8"]


def test_bytes_are_summed_by_axes():
    run = published_run("mixtral-8x7b", clusters.Target.parse("h100:2x8"), {})
    cells = dict(zip(clusters.COLUMNS, clusters.row(run, REPORT), strict=True))
    assert (cells["over `data` GB"], cells["over `expert` GB"]) == (4.0, 0.0)
    assert (cells["FLOPs / ideal"], cells["arguments GB"]) == (1.29, 35.0)
    assert (cells["data x expert"], cells["host waits"]) == ("2 x 8", 64)


def test_a_table_has_a_line_for_each_model(compiled):
    table = clusters.benchmark(argparse.Namespace(device=["h100"]))["clusters"]
    assert [row[:2] for row in table.rows] == [["Mixtral-8x7B", "h100:4x8"]]
    assert "| 35.0 |" not in str(table)
    assert "| 16.0 | 65.0 | 85.0 |" in str(table)


def test_a_target_there_is_not_is_refused(compiled):
    with pytest.raises(ValueError, match="target is 'abacus:1x8'; expected"):
        clusters.benchmark(argparse.Namespace(device=["abacus"]))
