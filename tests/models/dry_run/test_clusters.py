"""The smallest cluster is the first that fits; clusters too small for the state are not compiled for."""

import dataclasses

import pytest
from typer.testing import CliRunner

from jax_moe_lb.aot import ProgramReport
from jax_moe_lb.aot.collectives import ProgramCollective
from models.dry_run import smallest_cluster as clusters
from models.dry_run.step import PublishedRun

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
        share = STATE_BYTES // run.train.parallel.num_shards
        return dataclasses.replace(REPORT, target=target.name, argument_bytes=share, temp_bytes=65 * GB)

    monkeypatch.setattr(PublishedRun, "compile", compile_for)
    monkeypatch.setattr(clusters, "state_bytes", lambda run, target: STATE_BYTES // run.train.parallel.num_shards)
    monkeypatch.setattr(clusters, "use_no_accelerators", lambda: None)
    return targets


def test_the_first_that_fits_is_found(compiled):
    run, report = clusters.smallest("mixtral-8x7b", "h100", "plain")
    assert report.target == "h100:4x8"
    assert (run.train.parallel.data_parallel, run.train.parallel.system) == (4, "plain")
    # One node is too small for parameters, moments and gradients.
    assert compiled == ["h100:2x8", "h100:4x8"]


def test_bytes_are_summed_by_axes():
    run = PublishedRun.on("mixtral-8x7b", clusters.Target.parse("h100:2x8"), {})
    cells = dict(zip(clusters.COLUMNS, clusters.row(run, REPORT), strict=True))
    assert (cells["over `data`"], cells["over `expert`"], cells["FLOPs / ideal"]) == ("4.0 GB", "0.0 GB", "1.29")
    assert (cells["arguments"], cells["data x expert"], cells["host waits"]) == ("35.0 GB", "2 x 8", "64")


def test_a_table_has_a_line_for_each_model(compiled):
    result = CliRunner().invoke(clusters.app, ["--device", "h100", "--model", "mixtral-8x7b"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(lines) == 3
    assert {line.count("|") for line in lines} == {len(clusters.COLUMNS) + 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "llama"], "model is 'llama'; expected one of mixtral-8x7b"),
        (["--device", "abacus"], "target is 'abacus:1x8'; expected"),
    ],
)
def test_what_there_is_not_is_refused_in_one_line(arguments, message, compiled):
    result = CliRunner().invoke(clusters.app, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1
