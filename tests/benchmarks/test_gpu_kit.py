"""Stored programs load and run, sessions check the most valuable claims, and results reach all files."""

import shutil
import tomllib
from threading import Event
from time import sleep
from types import SimpleNamespace
from unittest.mock import MagicMock as Mock

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gpu import ahead, comparison, kit, once, processes, runner, session, tiles, times, written
from benchmarks.gpu.claims import PARTS
from benchmarks.gpu.clocks import Clocks
from benchmarks.gpu.comparison import TINY, Served, Timed, times_of
from benchmarks.gpu.counters import read_counters
from benchmarks.gpu.device import kind_in
from benchmarks.gpu.findings import CLAIMS, FALSE, NOT_REACHED, TRUE, Finding, Row, Scale, read_rows, write_row
from benchmarks.gpu.kit import Program
from benchmarks.gpu.pages import with_row, with_section
from benchmarks.gpu.tiles import COLUMNS, DENSE, TABLE, Load, group_sizes
from benchmarks.render.documents import RESULTS, ROOT, rendered
from benchmarks.render.results import Table, load, read, save
from jax_moe_lb.core import device_rates

TWICE = Program(lambda x: 2 * x, (jax.ShapeDtypeStruct((4,), "float32"),))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(kit, "FOLDER", tmp_path / "programs")
    monkeypatch.setattr(kit, "UNUSABLE", tmp_path / "unusable")
    monkeypatch.setattr(kit, "COMPILED", tmp_path / "compiled")
    monkeypatch.setattr(once, "FOLDER", tmp_path / "running")


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


def test_other_sources_reuse_programs_of_equal_text(monkeypatch):
    def build(program):
        return kit.build({"twice": program}, "h200", None, 1)["twice"]

    assert build(TWICE).endswith(" MB")
    first = kit.path_of("twice", "h200")
    monkeypatch.setattr(kit, "fingerprint", lambda: "another")
    kit.remove_others("h200")
    assert not first.exists()
    assert build(TWICE) == "compiled before"
    assert build(TWICE) == "stored before"
    kit.path_of("twice").parent.mkdir(parents=True)
    kit.path_of("twice", "h200").rename(kit.path_of("twice"))
    assert kit.load("twice")(jnp.ones(4)).tolist() == [2.0] * 4
    assert build(TWICE._replace(function=lambda x: 3 * x)).endswith(" MB")


def test_sources_of_programs_and_rates_decide_a_program(tmp_path, monkeypatch):
    monkeypatch.setattr(kit, "ROOT", tmp_path)
    found = [kit.fingerprint.__wrapped__()]
    for file in ("jax_moe_lb/core/devices/h200.toml", "benchmarks/gpu/tiles.py", "benchmarks/gpu/session.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("1")
        found.append(kit.fingerprint.__wrapped__())
    assert len(set(found)) == 3
    assert found[-1] == found[-2]


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


def test_no_program_is_loaded_after_a_load_that_does_not_end(tmp_path, monkeypatch):
    kit.store("twice", TWICE.lower(None).compile())
    once.FOLDER.mkdir()
    monkeypatch.setattr(runner, "run_part", lambda *_, **__: (once.FOLDER / "load").touch())
    session._run_items([session.Item("kit", 1.0)], tmp_path, None, [], dry_run=False)
    assert not kit.path_of("twice").exists()


def test_work_during_which_a_process_ended_is_not_tried_again(monkeypatch, capsys):
    with pytest.raises(ValueError, match="wrong"), once.guarded("product"):
        raise ValueError("wrong")
    with once.guarded("product"):
        assert len(once.marks()) == 1
    assert once.marks() == set()
    monkeypatch.setattr(once, "_device_works", lambda: False)
    monkeypatch.setattr(once.os, "_exit", Mock(side_effect=SystemExit))
    monkeypatch.setattr(once.Path, "unlink", Mock())
    with pytest.raises(SystemExit), once.guarded("product"):
        raise RuntimeError("illegal address")
    assert "product: illegal address" in capsys.readouterr().err
    with pytest.raises(once.EndedBefore, match="a process ended during: product"), once.guarded("product"):
        raise AssertionError("the work is tried again")


def test_a_program_whose_load_ended_a_process_is_compiled(monkeypatch):
    kit.store("twice", TWICE.lower(None).compile())
    monkeypatch.setattr(kit, "deserialize_and_load", Mock(side_effect=SystemExit))
    monkeypatch.setattr(once.Path, "unlink", Mock())
    with pytest.raises(SystemExit):
        kit.load("twice")
    assert kit.compiled_or_loaded("twice", TWICE)(jnp.ones(4)).tolist() == [2.0] * 4


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


def limits_of(items, monkeypatch, tmp_path, seconds=0.0, wait=None):
    clock, found = [100.0], {}

    def run_part(part, *_, limit_s, **__):
        found[part] = limit_s
        clock[0] += seconds

    monkeypatch.setattr(session.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(runner, "run_part", run_part)
    session._run_items(items, tmp_path, wait, [], dry_run=False)
    return found


def test_time_that_an_item_does_not_need_is_left_to_the_next_ones(tmp_path, monkeypatch):
    items = [session.Item("kit", 30.0), session.Item("device", 35.0), session.Item("comparison", 50.0)]
    assert limits_of(items, monkeypatch, tmp_path, 10.0) == {"kit": 30.0, "device": 55.0, "comparison": 95.0}
    late = limits_of(items, monkeypatch, tmp_path, 60.0, wait=lambda: None)
    assert late == {"kit": 30.0, "device": 5.0, "comparison": 30.0 + 35.0 + session.WAIT_S + 50.0 - 120.0}


def test_an_item_beside_another_shares_its_time(tmp_path, monkeypatch):
    started = Event()

    def run_part(part, *_, limit_s, **__):
        assert limit_s == pytest.approx(30.0, abs=1.0)
        if part == "training":
            started.set()
        else:
            assert started.wait(5.0)

    monkeypatch.setattr(runner, "run_part", run_part)
    items = [session.Item("training", 30.0, beside=True), session.Item("values", 30.0)]
    assert not session._run_items(items, tmp_path, None, [], dry_run=False)
    finished = []
    monkeypatch.setattr(runner, "run_part", lambda *_, **__: (sleep(0.1), finished.append(1)))
    session._run_items(items[:1], tmp_path, None, [], dry_run=False)
    assert finished


def test_sessions_stay_below_their_limits_and_the_rest_has_all_other_claims():
    first, second = (
        sum(item.limit_s for item in session.SESSIONS[name] if not item.beside) for name in ("first", "second")
    )
    assert first + session.WAIT_S <= 8 * 60
    assert second <= 4 * 60
    items = [*(item for items in session.SESSIONS.values() for item in items), *session.rest()]
    names = [name for item in items for name in item.claims()]
    assert sorted(names) == sorted(claim.name for claims in PARTS.values() for claim in claims)


def test_a_product_whose_operands_fail_leaves_the_others(monkeypatch):
    def measure(case, *_):
        if case.name == "up":
            raise RuntimeError("out of memory")
        yield ["tiny", case.name, case.product.kind, *[1] * 2, "even", "Triton kernel", TABLE, *[1.0] * 5, ""]

    monkeypatch.setattr(tiles, "_measure", measure)
    monkeypatch.setattr(tiles, "compile_all", lambda _: {})
    rows = tiles.fastest("Mixtral-8x7B", Scale(True)).table.rows
    assert [row[1] for row in rows] == ["up", "down"] * 3
    assert {row[-1] for row in rows if row[1] == "up"} == {"RuntimeError: out of memory"}


def test_a_process_is_killed_after_all_have_copied(tmp_path, monkeypatch):
    running, ended = Mock(poll=lambda: None), Mock(poll=lambda: 1, communicate=lambda: ("no peer", None))
    with pytest.raises(AssertionError, match="a process ended before it copied: no peer"):
        processes.await_copies([running, ended], tmp_path)
    monkeypatch.setattr(processes.time, "sleep", lambda _: (tmp_path / "1").touch())
    (tmp_path / "0").touch()
    processes.await_copies([running, running], tmp_path)
    monkeypatch.setattr(processes, "START_S", 0.0)
    with pytest.raises(AssertionError, match="no copies within 0 s"):
        processes.await_copies([running] * 3, tmp_path)


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
    made = {"basis": "measured", "source": written.SOURCE}
    added = {"dense": {"value": "800 TFLOP/s"}, "planner_kernel": {"value": {"8": "20 us"}}}
    added["kernels"] = {"value": {"Triton": {"product": "610 TFLOP/s"}}}
    assert found == tomllib.loads(TOML) | {key: made | value for key, value in added.items()}
    assert written.with_values(written.with_values(TOML, values), values) == written.with_values(TOML, values)
    other = '[kernels]\nbasis = "assumed"\nsource = "x"\n\n[kernels.value]\nMosaic = { outer = "1 TFLOP/s" }\n'
    found = tomllib.loads(written.with_values(other, values))["kernels"]
    kernels = {"Triton": {"product": "610 TFLOP/s"}, "Mosaic": {"outer": "1 TFLOP/s"}}
    assert found == {"value": kernels, "basis": "measured", "source": written.SOURCE}
    again = written.with_values(written.with_values(other, values), {"kernels.Triton": '{ product = "2 TFLOP/s" }'})
    assert tomllib.loads(again)["kernels"]["value"] == kernels | {"Triton": {"product": "2 TFLOP/s"}}


def test_a_kernel_with_a_wrong_result_has_no_rate(tmp_path):
    table = products([600.0])
    row = Row("fastest-a", TRUE, "", 1.0, "1 x H100", "", "")
    for note in ("wrong: differs by 1", "EndedBefore: a process ended during: product"):
        wrong = [*table.rows[0][:3], *table.rows[0][3:-1], note]
        write_row(tmp_path / "products.json", row, Table(COLUMNS, [*table.rows, wrong]))
        assert written.kernel_rates([tmp_path]) == {}
    write_row(tmp_path / "products.json", row, table)
    write_row(tmp_path / "values.json", Row("products-triton", FALSE, "", 1.0, "1 x H100", "", ""))
    assert written.kernel_rates([tmp_path]) == {}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("gpu*.json")), ids=lambda path: path.stem)
def test_stored_values_remain_if_nothing_new_was_measured(path):
    kind = kind_in(read(path)[path.stem].machine)
    text = (written.DEVICES / f"{kind}.toml").read_text()
    values = written.device_values(written.measured(written.tables_of(path), kind), {})
    assert written.with_values(text, values) == text


def test_results_of_a_run_keep_those_that_it_did_not_reach(tmp_path, monkeypatch):
    monkeypatch.setattr(written, "measured", lambda run, kind: {"dense": 8e14})
    names = [claim.name for claim in PARTS["copies"]]
    columns = dict.fromkeys(("part", "name", "claim", "outcome", "found"), "")
    before = [["copies", name, "text", TRUE, "before"] for name in [*names, "no longer a claim"]]
    save({CLAIMS: Table(columns, before), "gemm": Table({"": ""}, [["kept"]])}, tmp_path / "gpu.json", "1 x H100")
    run = tmp_path / "first"
    write_row(run / "copies.json", Row(names[0], FALSE, "now", 1.0, "1 x H100", "", ""), Table({"": ""}, [["new"]]))
    write_row(run / "copies.json", Row(names[1], NOT_REACHED, "no time", 1.0, "", "", ""))
    written.write([run], tmp_path / "gpu.json", tmp_path, written.kind_of([run]))
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


def results_of_an_h200(folder):
    """Write results as of an H200: tables of an H100 and rates of a kernel."""
    old, device = load(RESULTS / "gpu.json"), "1 x NVIDIA H200"
    parts = [["4", *row[1:3], "a kernel", "", 1.0, row[3]] for row in old["parts"].rows if row[0] == "qwen3"]
    grouped = [
        ["Qwen3-30B-A3B", name, kind, 65536, 65536, "even", *kernel, 1.0, rate, None, 1.0, None, ""]
        for kind in written.KINDS
        for name in ("up", "down")
        for kernel, rate in ((("Triton kernel", TABLE), 600.0), (("Hopper kernel", TABLE), 700.0), (DENSE_ROW, 800.0))
    ]
    columns = dict.fromkeys(("skew", "system", "part", "kernel", "result", "executions", "ms"), "")
    tables = {
        ("comparison", "rank-qwen3"): old["rank-qwen3"],
        ("comparison", "rank-kernels-qwen3"): Table(columns, parts),
        ("products", "fastest-qwen3-65536"): Table(COLUMNS, grouped),
        ("kernels", "planner-time"): old["planner-time"],
        ("compiled", "timeline"): old["timeline"],
    }
    for (part, claim), table in tables.items():
        write_row(folder / f"{part}.json", Row(claim, TRUE, "found", 1.0, device, "", "run"), table)
    # The launcher has no device.
    write_row(folder / "training.json", Row("trains-exact", NOT_REACHED, "no time", 0.0, "", "", "run"))


DENSE_ROW = (DENSE, "cuBLAS")
MEASURED = ("dense", "grouped", "kernels", "experts", "memory_share", "planner_kernel", "small_operations")


def test_results_of_an_h200_reach_all_files(tmp_path, monkeypatch):
    run, results = tmp_path / "first", tmp_path / "benchmarks" / "results"
    results_of_an_h200(run)
    results.mkdir(parents=True)
    (tmp_path / "docs" / "results").mkdir(parents=True)
    for file in ("benchmarks/results/gpu.json", "docs/status.md", "docs/results/gpu.md"):
        shutil.copy(ROOT / file, tmp_path / file)
    kind = written.kind_of([run])
    out = written.write([run], results / "gpu.json", tmp_path, kind)
    for _ in range(2):
        written.write_pages(out, kind, tmp_path)
    # Results: in a file of their own, with the machine and command of the run.
    assert (kind, out.name) == ("h200", "gpu_h200.json")
    assert (results / "gpu.json").read_bytes() == (RESULTS / "gpu.json").read_bytes()
    record = read(out)["gpu_h200"]
    assert record.machine.endswith("; 1 x NVIDIA H200")
    assert record.command == "python -m benchmarks.gpu.session"
    assert {"rank-qwen3", "parts", "products", "planner-time", "timeline", "claims"} <= set(record.tables)
    # Rates: all are of this run, and the others of an H100.
    content = tomllib.loads((tmp_path / "h200.toml").read_text())
    assert {key: content[key]["basis"] for key in MEASURED} == dict.fromkeys(MEASURED, "measured")
    files = device_rates._files() | {"h200": content}
    monkeypatch.setattr(device_rates, "_files", lambda: files)
    h100, h200 = (device_rates.device_rates(one, "cuda") for one in ("h100", "h200"))
    assert h200.kernels["Hopper"] == dict.fromkeys(written.KINDS, 700e12)
    assert (h200.dense, h200.experts.keys(), h200.link) == (800e12, {4096}, h100.link)
    # Pages: a section with the tables, and a row of the status that other pages include.
    page = rendered((tmp_path / "docs/results/gpu.md").read_text(), results, tmp_path / "docs" / "results")
    assert page.count("## On an H200") == 1
    section = page.partition("## On an H200")[2]
    assert "1 x NVIDIA H200; Python" in section
    assert "| Qwen3-30B-A3B | up | product | 65536 | 4096 | 600 | 700 |" in section
    assert "| comparison | rank-qwen3 | true |" in section
    assert "| 4 | exact | 1.01 |" in section
    assert "| 2 | exact |" not in section
    readme = rendered("<!-- include: docs/status.md -->\n<!-- end -->\n", results, tmp_path)
    row = "| one NVIDIA H200 | **run** | [5 claims true, 0 false](docs/results/gpu.md#on-an-h200), without exchanges |"
    assert readme.count(row) == readme.count("H200 |") == 1


def test_pages_have_the_results_of_other_gpus():
    page, status = ((ROOT / "docs" / name).read_text() for name in ("results/gpu.md", "status.md"))
    for path in RESULTS.glob("gpu_*.json"):
        record = read(path)[path.stem]
        kind = kind_in(record.machine)
        assert with_section(page, kind, path.stem, record) == page
        assert with_row(status, kind, record.tables) == status


def test_results_of_no_gpu_or_of_two_are_refused(tmp_path):
    for device, message in (("1 x cpu", "results are of 1 x cpu; expected one GPU"), ("1 x H100", "1 x H100, 1 x cpu")):
        write_row(tmp_path / "copies.json", Row(device, TRUE, "found", 1.0, device, "", ""))
        if device == "1 x cpu":
            with pytest.raises(ValueError, match=message):
                written.kind_of([tmp_path])
    assert written.kind_of([tmp_path]) == "h100"
    write_row(tmp_path / "device.json", Row("clocks", TRUE, "found", 1.0, "1 x NVIDIA H200", "", ""))
    with pytest.raises(ValueError, match="results are of 1 x H100, 1 x NVIDIA H200, 1 x cpu; expected one GPU of"):
        written.kind_of([tmp_path])


def test_a_run_keeps_the_models_that_it_did_not_reach():
    table = Table({"model": "", "ms": ""}, [["a", 1.0], ["b", 2.0]])
    found = written._with_older_rows(Table(table.columns, [["b", 3.0]]), table)
    assert found.rows == [["b", 3.0], ["a", 1.0]]
    assert written._with_older_rows(Table({"model": ""}, [["b"]]), table).rows == [["b"]]


@pytest.mark.parametrize("run", [{"products": []}, {"planner-time": [{"options": "eps = 0.01, localize"}]}])
def test_rates_of_incomplete_tables_are_left_out(run):
    assert written.measured(run) == {}


def test_a_gpu_is_named_by_whole_words():
    names = ("1 x NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA GB200", "NVIDIA GH200 480GB", "cpu")
    assert [kind_in(name) for name in names] == ["h200", "a100", "gb200", None, None]


def test_rates_of_tables_that_were_not_reached_are_left_out():
    run = dict(written.tables_of())
    del run["planner-time"], run["timeline"]
    assert set(written.measured(run)) == {"dense", "grouped", "small_operations"}


def test_the_page_has_the_limits_of_the_items():
    page = (ROOT / "docs/how-to/gpu.md").read_text().partition("| command | checks")[2].partition("\n\n")[0]
    limits = [int(row.rsplit("|", 2)[1]) for row in page.splitlines()[2:]]
    wanted = [
        item.limit_s + (session.WAIT_S if item.part == session.STEPS_OF_RANKS else 0.0)
        for items in session.SESSIONS.values()
        for item in items
        if not item.beside
    ]
    assert limits == wanted
