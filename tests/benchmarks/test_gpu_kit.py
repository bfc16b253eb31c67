"""Stored programs load and run, sessions check the most valuable claims, and results reach all files."""

import tomllib
from types import SimpleNamespace
from unittest.mock import MagicMock as Mock

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gpu import ahead, comparison, kit, runner, session, times, written
from benchmarks.gpu.claims import PARTS
from benchmarks.gpu.clocks import Clocks
from benchmarks.gpu.comparison import TINY, Served, Timed, times_of
from benchmarks.gpu.counters import read_counters
from benchmarks.gpu.findings import CLAIMS, FALSE, NOT_REACHED, TRUE, Finding, Row, Scale, read_rows, write_row
from benchmarks.gpu.kit import Program
from benchmarks.gpu.tiles import COLUMNS, DENSE, TABLE, Load, group_sizes
from benchmarks.render.results import Table, load, save

TWICE = Program(lambda x: 2 * x, (jax.ShapeDtypeStruct((4,), "float32"),))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(kit, "FOLDER", tmp_path / "programs")
    monkeypatch.setattr(kit, "UNUSABLE", tmp_path / "unusable")


def fail(self, device):
    raise RuntimeError("traced")


def test_a_stored_program_runs_without_a_trace(monkeypatch):
    key = "twice", "of a number"
    assert next(iter(kit.build({kit.name_of(key): TWICE}, None, None, 1).values())).endswith(" MB")
    assert kit.build({kit.name_of(key): TWICE}, None, None, 1) == {"twice, of a number": "stored before"}
    monkeypatch.setattr(Program, "lower", fail)
    found = kit.compile_all({key: TWICE, ("absent",): TWICE})
    assert found[key](jnp.ones(4)).tolist() == [2.0] * 4
    assert str(found["absent",]) == "traced"


def test_a_program_that_does_not_load_is_compiled(capsys):
    path = kit.path_of("twice")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no program")
    assert kit.compiled_or_loaded("twice", TWICE)(jnp.ones(4)).tolist() == [2.0] * 4
    assert "twice does not load" in capsys.readouterr().err


def test_programs_of_other_sources_are_not_loaded(monkeypatch):
    kit.store("twice", TWICE.lower(None).compile())
    monkeypatch.setattr(kit, "fingerprint", lambda: "another")
    assert kit.load("twice") is None


def test_the_first_check_loads_a_program():
    assert ahead.stored_programs_load(Scale(True)) == Finding(True, "1 programs")
    assert ahead.stored_programs_load(Scale(False)).holds


def test_no_program_is_loaded_after_a_failed_first_load(tmp_path, monkeypatch):
    kit.store("twice", TWICE.lower(None).compile())
    path = tmp_path / "gpu" / "kit.json"

    def run_part(part, names, path, **_):
        write_row(path, Row(names[0], FALSE, "found", 1.0, "1 x H100", "", "run"))

    monkeypatch.setattr(runner, "run_part", run_part)
    session._run_items([session.Item("kit", 1.0)], path.parent, None, [], dry_run=False)
    assert kit.load("twice") is None


def test_a_part_that_fails_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    called = []

    def run_part(part, *_, **__):
        called.append(part)
        if part == "kit":
            raise OSError("no space")

    monkeypatch.setattr(runner, "run_part", run_part)
    items = [session.Item("kit", 1.0), session.Item("device", 1.0)]
    assert session._run_items(items, tmp_path, None, [], dry_run=False)
    assert called == ["kit", "device"]
    assert "no space" in capsys.readouterr().err


def test_sessions_stay_below_their_limits_and_the_rest_has_all_other_claims():
    assert sum(item.limit_s for item in session.SESSIONS["first"]) + session.WAIT_S <= 8 * 60
    assert sum(item.limit_s for item in session.SESSIONS["second"]) <= 4 * 60
    items = [*(item for items in session.SESSIONS.values() for item in items), *session.rest()]
    names = [name for item in items for name in item.claims()]
    assert sorted(names) == sorted(claim.name for claims in PARTS.values() for claim in claims)


def test_an_even_load_has_no_replicas_and_a_hot_one_has_all_rows():
    assert group_sizes(Load(65536, "even"), 18, 2).tolist() == [4096] * 16 + [0] * 2
    assert group_sizes(Load(65536, "hot"), 18, 2).sum() == 65536


def test_a_clock_that_is_not_reported_leaves_the_others():
    clocks = Clocks()
    assert clocks.medians() == [None] * 4
    clocks._read(["1980, 2619, [N/A], 40\n", "no device\n", "1900, 2619, [N/A], 41.5\n"])
    assert clocks.medians() == [1940.0, 2619.0, None, 40.75]


def test_estimates_of_a_kernel_are_of_as_many_slots():
    found = times.estimates()
    assert all((*size, label) in found for size in times.SIZES for label in times.OPTIONS)
    assert found[64, 256, 5, "eps = 0"] != found[64, 256, 6, "eps = 0"]


def test_programs_take_turns():
    called = []
    calls = {name: lambda name=name: called.append(name) for name in "ab"}
    found = times_of(calls, Scale(True), Clocks())
    assert set(found) == {"a", "b"}
    assert all(isinstance(one, Timed) and one.mhz is None for one in found.values())
    assert called[-2:] == ["b", "a"]


def test_a_program_that_fails_at_a_skew_leaves_the_others(monkeypatch):
    names = [comparison.PLAIN, comparison.ONE_ROUND]
    monkeypatch.setattr(comparison, "variants", lambda layer, of=comparison.variants: {n: of(layer)[n] for n in names})
    served = {(n, "even"): Served.of(TINY, one, "even") for n, one in comparison.variants(TINY).items()}
    programs = SimpleNamespace(
        compiled={names[0]: lambda _: jnp.ones(1), names[1]: Mock(side_effect=RuntimeError("out of memory"))},
        reasons={},
        peak_gb={},
        compiled_bytes=lambda name: 0,
    )
    ready = comparison.Prepared(TINY, programs, served, {key: [None] for key in served})
    found = comparison.measured(ready, "even", Scale(True), Clocks())
    assert [row[comparison.TIME] is None for row in found] == [False, True]
    assert [row[-1] for row in found] == ["", "RuntimeError: out of memory"]


def test_a_failed_profile_does_not_fail_the_program_itself(monkeypatch):
    programs = {key: ValueError("no kernel") if not key[2] else None for key in comparison.rank_programs(TINY)}
    monkeypatch.setattr(comparison, "compile_all", lambda _: programs)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(comparison.Programs, "compiled_bytes", lambda self, name: 0)
    monkeypatch.setattr(comparison.Programs, "_run_first", lambda self, name, inputs: None)
    found = comparison.Programs(TINY, Mock())
    assert found.reasons == {}
    assert {type(one) for one in found.profiled.values()} == {ValueError}


def test_counters_are_read_after_other_lines():
    text = '==PROF== Connected\n"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
    text += '"0","grouped_product","gpu__time_duration.sum","us","1,204.5"\n"0","grouped_product","new","%","n/a"\n'
    assert read_counters(text) == [["0: grouped_product", "us", "us", 1204.5], ["0: grouped_product", "new", "%", None]]


def products(tflops):
    start = ["a model", "up", "product", 8192, 8192]
    rows = [[*start, "even", "Triton kernel", TABLE, 1.0, one, None, 1.0, 1980.0, ""] for one in tflops]
    rows += [[*start, "even", DENSE, "cuBLAS", 1.0, 800.0, None, 1.0, 1980.0, ""]]
    rows += [[*start, "hot", "Triton kernel", TABLE, 1.0, 1.0, None, 1.0, 1980.0, ""]]
    return Table(COLUMNS, [*rows, [*start, "even", "Triton kernel", TABLE, 1.0, 1.0, None, 1.0, None, "wrong"]])


TOML = """\
base = "nvidia"

[dense]
value = "600 TFLOP/s"
basis = "assumed"
source = \"\"\"
large products \\
of cuBLAS\"\"\"

[link]
value = "450 GB/s"
basis = "data sheet"
source = "NVLink 4"
"""


def test_measured_rates_replace_assumed_ones(tmp_path):
    write_row(tmp_path / "products.json", Row("fastest-a", TRUE, "", 1.0, "1 x H100", "", ""), products([600.0, 620.0]))
    rates = written.kernel_rates([tmp_path])
    assert rates == {("Triton", "product"): 610.0}
    values = written.device_values({"dense": 8e14, "planner_kernel": {8: 2e-5}}, rates)
    written_values = {"dense": '"800 TFLOP/s"', "planner_kernel": '{ 8 = "20 us" }'}
    assert values == written_values | {"kernels.Triton": '{ product = "610 TFLOP/s" }'}
    found = tomllib.loads(written.with_values(TOML, values))
    dense = {"value": "800 TFLOP/s", "basis": "measured", "source": written.SOURCE}
    assert found == tomllib.loads(TOML) | {"dense": dense}
    other = '[kernels]\nbasis = "assumed"\nsource = "x"\n\n[kernels.value]\nMosaic = { outer = "1 TFLOP/s" }\n'
    found = tomllib.loads(written.with_values(other, values))["kernels"]
    kernels = {"Triton": {"product": "610 TFLOP/s"}, "Mosaic": {"outer": "1 TFLOP/s"}}
    assert found == {"value": kernels, "basis": "measured", "source": written.SOURCE}
    again = written.with_values(written.with_values(other, values), {"kernels.Triton": '{ product = "2 TFLOP/s" }'})
    assert tomllib.loads(again)["kernels"]["value"] == kernels | {"Triton": {"product": "2 TFLOP/s"}}


def test_stored_values_remain_if_nothing_new_was_measured():
    text = (written.DEVICES / "h100.toml").read_text()
    values = written.device_values(written.measured(written.tables_of()), {})
    assert written.with_values(text, values) == text


def test_results_of_a_run_keep_those_that_it_did_not_reach(tmp_path, monkeypatch):
    monkeypatch.setattr(written, "measured", lambda run: {"dense": 8e14})
    names = [claim.name for claim in PARTS["copies"]]
    columns = dict.fromkeys(("part", "name", "claim", "outcome", "found"), "")
    before = [["copies", name, "text", TRUE, "before"] for name in [*names, "no longer a claim"]]
    save({CLAIMS: Table(columns, before), "gemm": Table({"": ""}, [["kept"]])}, tmp_path / "gpu.json", "1 x H100")
    run = tmp_path / "first"
    write_row(run / "copies.json", Row(names[0], FALSE, "now", 1.0, "1 x H100", "", ""), Table({"": ""}, [["new"]]))
    write_row(run / "copies.json", Row(names[1], NOT_REACHED, "no time", 1.0, "", "", ""))
    written.write([run], tmp_path / "gpu.json", tmp_path)
    assert tomllib.loads((tmp_path / "h100.toml").read_text())["dense"]["value"] == "800 TFLOP/s"
    tables = load(tmp_path / "gpu.json")
    outcomes = {row[1]: row[3:] for row in tables[CLAIMS].rows}
    assert outcomes[names[0]] == [FALSE, "now"]
    assert outcomes[names[1]] == [TRUE, "before"]
    assert outcomes["clocks"] == [NOT_REACHED, "not run"]
    assert "no longer a claim" not in outcomes
    assert tables["gemm"].rows == [["kept"]]
    assert tables[names[0]].rows == [["new"]]
    assert read_rows(run / "copies.json")[names[0]].device == "1 x H100"


def test_results_of_another_gpu_have_a_file_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(written, "measured", lambda run: {})
    old = tmp_path / "gpu.json"
    save({CLAIMS: Table(dict.fromkeys(("part", "name", "claim", "outcome", "found"), ""), [])}, old, "1 x NVIDIA H100")
    before, run = old.read_text(), tmp_path / "first"
    write_row(
        run / "copies.json", Row("gemm", TRUE, "found", 1.0, "1 x NVIDIA H200", "", ""), Table({"": ""}, [["new"]])
    )
    written.write([run], old, tmp_path)
    assert old.read_text() == before
    assert load(tmp_path / "gpu_h200.json")["gemm"].rows == [["new"]]


def test_rates_of_tables_that_were_not_reached_are_left_out():
    run = dict(written.tables_of())
    del run["planner-time"], run["timeline"]
    assert set(written.measured(run)) == {"dense", "grouped", "small_operations"}
