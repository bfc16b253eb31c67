"""Input designed to hang, exhaust memory or flood the output ends with one short line and exit code 2, within
seconds.
"""

import io
import os
import resource
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import typer
import yaml

from jax_moe_lb import Plan
from jax_moe_lb.advise.advise import Candidate, pays_from
from jax_moe_lb.advise.evaluate import Workload
from jax_moe_lb.cli import main
from jax_moe_lb.cli.app import app
from jax_moe_lb.cli.output import KINDS, print_error
from jax_moe_lb.core import quantities as units
from jax_moe_lb.core.checks import shown
from jax_moe_lb.layer.systems import plain
from jax_moe_lb.sim import Cluster, Links, ModelShape, Step, simulate, skewed_counts
from jax_moe_lb.sim.config import load_config, preset_names
from tests.cli.commands import refusal
from tests.marks import parametrize

MOST_S = 5.0
MOST_CHARACTERS = 300

CONFIG = """
version: 1
cluster:
  levels:
    - {name: gpu, size: 4, rate: 10 GB/s}
  gemm: {peak: 1 TFLOP/s, half_rows: 16}
  compute: 1 TFLOP/s
model: {layers: 2, hidden: 64, inner: 128, experts: 8, per_token: 2, tokens: 64}
"""

LAUGHS = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))
MERGES = "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 10))
CHAIN = "".join(f"a{i}: &a{i} {{<<: *a{i - 1}, k{i}: 0}}\n" for i in range(1, 1000))

TEXTS = {
    "billion laughs": (
        "a0: &a0 [lol]\n" + LAUGHS,
        "values, including repetitions by aliases, by line 5; expected at most 10000",
    ),
    "merges of merges": ("a0: &a0 {k: v}\n" + MERGES, "expected at most 10000"),
    "chain of merges": ("a0: &a0 {k: v}\n" + CHAIN, "expected at most 10000"),
    "alias of itself": ("a: &a [*a]", "repeats 'a' inside itself in line 1"),
    "depth of lists": ("a: " + "[" * 3000 + "]" * 3000, "; expected at most 32"),
    "depth of keys": ("\n".join(" " * i + "a:" for i in range(500)), "; expected at most 32"),
    "depth of keys in braces": ("{a: " * 3000 + "}" * 3000, "; expected at most 32"),
    "many values": ("a: [" + "0, " * 20_000 + "]", "expected at most 10000"),
    "a long number": ("version: " + "9" * 5000, "5000 characters in a value by line 1; expected at most 1000"),
    "a long key": ("k" * 900 + ": 1", "version is missing; expected the key version: 1"),
    "a large file": (
        "# nothing\n" * 100_000,
        "has 1000000 bytes; expected at most 262144. Pass --file-limits 4 or limits=",
    ),
    "an unknown alias": ("a: *" + "b" * 5000, "found undefined alias"),
    "a day that is none": ("version: 2000-99-99", "is not valid YAML: a value cannot be read"),
    "a tag without a value": ("version: !!int ''", "is not valid YAML: a value cannot be read"),
    "a tag that runs code": ("a: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
    "bytes of a terminal": ("version: '\\e[2J\\n'", "version is"),
}

CLUSTER, LEVEL, MODEL = ("cluster",), ("cluster", "levels", 0), ("model",)

CONFIGS = {
    "power of ten": (LEVEL, {"rate": "1e30000000 GB/s"}, "levels[0].rate is '1e30000000 GB/s'; expected a rate above"),
    "many digits": (LEVEL, {"latency": "9" * 900 + " s"}, "expected a time with its unit"),
    "rate beyond reason": (LEVEL, {"rate": "1e300 GB/s"}, "from 1e-15 to 1e+30 in units without a prefix"),
    "rate beneath reason": (LEVEL, {"rate": "1e-300 GB/s"}, "from 1e-15 to 1e+30 in units without a prefix"),
    "rate of lists": (LEVEL, {"rate": [["x" * 100] * 40] * 40}, "levels[0].rate is [['xxx"),
    "many levels": (CLUSTER, {"levels": [{"name": "gpu", "size": 1, "rate": "1 GB/s"}] * 900}, "at most 3 items"),
    "many points": (CLUSTER, {"gemm": {"rows": list(range(1, 3000)), "speeds": ["1 TFLOP/s"]}}, "at most 1000 items"),
    "rows that are no number": (CLUSTER, {"gemm": {"rows": [float("nan")], "speeds": ["1 TFLOP/s"]}}, "is nan"),
    "ranks": (LEVEL, {"size": 10**30}, "levels[0].size is 1000000000000000000000000000000: input should be less"),
    "layers": (MODEL, {"layers": 10**9}, "model.layers is 1000000000: input should be less than or equal to 1000"),
    "tokens in words": (MODEL, {"tokens": "many"}, "model.tokens is 'many': input should be a valid integer"),
    "an exponent of tokens": (MODEL, {"tokens": "1e30"}, "model.tokens is 1e+30: input should be a valid integer"),
    "width": (MODEL, {"hidden": 10**9}, "model.hidden is 1000000000: input should be less than or equal to 131072"),
    "32 bits of copies": (MODEL, {"tokens": 2**31 - 1}, "tokens is 2147483647; expected at most 268435455 with 2"),
    "layers to draw": ((), {"routing": {"layers": 10**9}}, "routing.layers is 1000000000: input should be less"),
    "negative seed": ((), {"routing": {"seed": -1}}, "routing.seed is -1: input should be greater"),
    "slots": ((), {"replica_slots": 10**400}, "replica_slots is an integer of 1329 bits"),
    "unknown key": ((), {"k" * 900: 1}, "kkk is unknown"),
    "model of a long name": ((), {"model": "m" * 900}, "no preset and no .yaml file"),
    "model of a device": ((), {"model": "/dev/zero"}, "is not a regular file"),
}

OPTIONS = {
    "tokens": (("--tokens", "17179869248"), "--tokens is '17179869248'; expected an integer, from 1 to 2147483647"),
    "digits": (("--tokens", "9" * 5000), "expected an integer, from 1 to 2147483647"),
    "letters": (("--tokens", "x" * 5000), "expected an integer, at least 1"),
    "slots": (("--system", "ultraep", "--replica-slots", "9" * 400), "expected an integer, from 0 to 2147483647"),
    "imbalance": (("--imbalance", "9" * 5000), "expected a number, at least 1"),
    "domains": (("--system", "hybridep", "--domain-sizes", "9" * 400), "expected an integer, from 1 to 2147483647"),
}


@pytest.fixture
def refused(capsys):
    """Run a command that must end quickly, and return its message."""

    def run(*argv):
        # CPU time: other programs may take the cores.
        start = time.process_time()
        error = refusal(capsys, *argv)
        assert time.process_time() - start < MOST_S
        assert len(error) <= MOST_CHARACTERS
        assert error.strip().isprintable()
        return error

    return run


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    # Short paths leave room in a line for the error.
    monkeypatch.chdir(tmp_path)
    return tmp_path


def changed(path, change):
    data = yaml.safe_load(CONFIG)
    place = data
    for key in path:
        place = place[key]
    place.update(change)
    with open("x.yaml", "w") as file:
        # Avoid aliases for repeated values.
        yaml.dump(data, file, Dumper=type("Plain", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True}), width=1e9)
    return "x.yaml"


@pytest.mark.parametrize("name", TEXTS)
def test_yaml_that_grows_is_refused_before_it_does(refused, folder, name):
    text, message = TEXTS[name]
    (folder / "x.yaml").write_text(text)
    error = refused("simulate", "x.yaml")
    assert error.startswith("error: CONFIG x.yaml")
    assert message in error


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.slow
def test_numbers_beyond_all_machines_are_refused(refused, name):
    path, change, message = CONFIGS[name]
    assert message in refused("simulate", changed(path, change))


@pytest.mark.parametrize("name", OPTIONS)
def test_options_beyond_all_machines_are_refused(refused, folder, name):
    argv, message = OPTIONS[name]
    (folder / "x.yaml").write_text(CONFIG)
    assert message in refused("simulate", "x.yaml", *argv)


def test_counts_that_no_memory_holds_are_refused(refused, folder):
    data = yaml.safe_load(CONFIG)
    data["cluster"]["levels"][0]["size"] = data["model"]["experts"] = 20_000
    (folder / "x.yaml").write_text(yaml.safe_dump(data))
    error = refused("simulate", "x.yaml")
    assert "20000 ranks and 20000 experts are too many; expected at most 16777216 entries in a layer" in error


@pytest.mark.slow
def test_timelines_that_no_memory_holds_are_refused(refused, folder):
    data = yaml.safe_load(CONFIG)
    data["cluster"]["levels"][0]["size"] = data["model"]["experts"] = 4096
    data["model"] |= {"layers": 1000, "tokens": 1}
    data["routing"] = {"layers": 1}
    (folder / "x.yaml").write_text(yaml.safe_dump(data))
    np.save("counts.npy", np.zeros((4096, 4096), np.int8))
    error = refused("simulate", "x.yaml", "--trace", "counts.npy")
    assert "layers is 1000 on 4096 ranks; expected at most 512 layers" in error


def test_more_devices_than_a_cpu_can_play_are_refused(refused):
    error = refused("calibrate", "x.yaml", "--ranks", "100000000")
    assert "--ranks is '100000000'; expected an integer, from 2 to 256" in error


@pytest.mark.parametrize("digits", [400, 5000])
def test_bytes_of_an_expert_have_few_digits(refused, digits):
    np.save("counts.npy", np.ones((4, 8), int))
    error = refused("plan", "counts.npy", "--balancer", "plain", "--expert-bytes", "9" * digits)
    assert "--expert-bytes is '999" in error
    assert "expected an integer, from 1 to 1000000000000000000" in error


def header(shape, dtype="<i8"):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue()


def archive(**members):
    with zipfile.ZipFile("x.npz", "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return "x.npz"


def lzma():
    with zipfile.ZipFile("x.npz", "w", zipfile.ZIP_LZMA) as file:
        file.writestr("counts.npy", header((1,)) + bytes(8))
    return "x.npz"


def plain_file(content):
    with open("x.npy", "wb") as file:
        file.write(content)
    return "x.npy"


def unpacks_to_6_gib():
    with (
        zipfile.ZipFile("x.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file,
        file.open("counts.npy", "w", force_zip64=True) as member,
    ):
        # The remaining data may be shorter, as the header determines the size.
        member.write(header((6, 1, 2**13, 2**14)) + bytes(2**24))
    return "x.npz"


def directory(members, num_bytes, before=b""):
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, members, members, num_bytes, 0, 0)
    return plain_file(b"PK" + bytes(30) + before + end)


ARRAYS = {
    "terabytes": (
        lambda: plain_file(header((2**20, 2**20))),
        "arrays of 8796093022208 bytes; expected at most 536870912",
    ),
    "dimensions of 300 digits": (lambda: plain_file(header((10**300, 8))), "arrays of more than 10^20 bytes"),
    "entries without bytes": (lambda: plain_file(header((10**12, 4, 8), "|V0")), "arrays of 32000000000000 bytes"),
    "large entries": (lambda: plain_file(header((1, 1), "|V2000000000")), "arrays of 2000000000 bytes"),
    "a negative dimension": (lambda: plain_file(header((-4, 8))), "damaged"),
    "a header in a header": (lambda: plain_file(header((1,)).replace(b"(1,)", b"(" * 4)), "damaged"),
    "a header of gigabytes": (lambda: archive(**{"counts.npy": b"\x93NUMPY\2\0\0\0\0\xff" + bytes(2**20)}), "damaged"),
    "no counts for a header": (lambda: plain_file(header((4, 8))), "damaged"),
    "a raw member": (lambda: archive(counts=b"1, 2, 3"), "damaged"),
    "a raw member by the name of an array": (lambda: archive(**{"counts.npy": b"1, 2, 3"}), "damaged"),
    "another compression": (lzma, "damaged"),
    "900 members": (
        lambda: archive(**{f"member {i}.npy": b"" for i in range(900)}),
        "and 897 more]; expected an array",
    ),
    "long names": (lambda: archive(**{c * 50_000: b"" for c in "abc"}), "expected an array named 'counts'"),
    "a directory of gigabytes": (lambda: directory(1, 2**31), "a directory of 2147483648 bytes; expected at most"),
    "a directory of 64 bits": (lambda: directory(1, 46, b"PK\6\7" + bytes(16)), "damaged"),
    "many ranks": (lambda: np.save("x.npy", np.zeros((20_000, 20_000), np.int8)) or "x.npy", "16777216 entries per"),
}


@parametrize("name", [name for name in ARRAYS if name != "many ranks"], ["many ranks"])
def test_arrays_are_refused_by_what_they_promise(refused, name):
    make, message = ARRAYS[name]
    path = make()
    error = refused("plan", path, "--balancer", "plain")
    assert message in error
    assert f"COUNTS {path}" in error or f"COUNTS is {path}" in error


def test_a_header_of_the_second_version_is_read(folder):
    with open("x.npy", "wb") as file:
        np.lib.format.write_array(file, np.ones((4, 8), int), version=(2, 0))
    assert main(["plan", "x.npy", "--balancer", "plain"]) == 0


@pytest.mark.slow
def test_an_array_that_does_not_fit_is_never_made(folder):
    """The process may use its memory after imports plus 1 GiB, less than half of the array."""
    path = unpacks_to_6_gib()
    program = (
        "import resource, sys\nfrom jax_moe_lb.cli import main\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))\n"
        "print([main([command, *sys.argv[1:]]) for command in ('plan', 'replay')])"
    )
    command = [sys.executable, "-c", program, path, "--balancer", "plain"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stdout == "[2, 2]\n"
    assert ended.stderr.count("arrays of 6442450944 bytes; expected at most 536870912") == 2


@pytest.mark.parametrize("kind", ["device", "pipe"])
@pytest.mark.parametrize("argument", ["COUNTS", "TRACE", "--trace", "CONFIG", "MODEL", "CLUSTER"])
def test_what_is_no_regular_file_is_not_opened(refused, folder, argument, kind):
    (folder / "x.yaml").write_text(CONFIG)
    os.mkfifo("pipe")
    path = "/dev/zero" if kind == "device" else "./pipe"
    argv = {
        "COUNTS": ("plan", path, "--balancer", "plain"),
        "TRACE": ("replay", path, "--balancer", "plain"),
        "--trace": ("simulate", "x.yaml", "--trace", path),
        "CONFIG": ("simulate", path),
        "MODEL": ("advise", path, "x.yaml"),
        "CLUSTER": ("advise", "x.yaml", path),
    }[argument]
    error = refused(*argv)
    assert error.startswith(f"error: {argument} ")
    assert "not a regular file; expected" in error


WRITES = {
    "plan --out": ("plan", "counts.npy", "--balancer", "plain", "--out"),
    "replay --out": ("replay", "trace.npy", "--balancer", "plain", "--out"),
    "simulate --timeline": ("simulate", "x.yaml", "--timeline"),
    "calibrate OUT": ("calibrate",),
}


@pytest.fixture
def inputs(folder):
    (folder / "x.yaml").write_text(CONFIG)
    np.save("counts.npy", np.ones((4, 8), int))
    np.save("trace.npy", np.ones((2, 1, 4, 8), int))


@pytest.fixture
def measured(monkeypatch):
    """Replace the measurement with an instant one."""
    from jax_moe_lb.sim import measure as calibrate
    from jax_moe_lb.sim.machine_profile import Measured, MeasuredExchange

    level, curve = MeasuredExchange("gpu", 2, 1e9, 1e-5), ((1.0, 2.0), (1e9, 2e9))
    found = Measured("machine", "gpu", "2026-01-31", 0.0, 2, 2, (level,), *curve, 1e10, 1e9, 1e-4, 1e10)
    monkeypatch.setattr(calibrate, "measure", lambda ranks: found)


def test_a_machine_is_written_to_a_path_without_suffix(measured, folder, capsys):
    assert main(["calibrate", str(folder / "machine")]) == 0
    assert load_config("CONFIG", str(folder / "machine")).cluster is not None
    capsys.readouterr()


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.slow
def test_a_full_disk_is_one_line_and_leaves_files_as_they_were(refused, inputs, measured, folder, name):
    full_disk(refused, folder, name.split()[1], WRITES[name])


@pytest.mark.slow
def test_a_full_disk_is_one_line_for_a_picture_too(refused, inputs, folder, capsys):
    # Import the plotting library in advance, which takes some time.
    assert main(["simulate", "x.yaml", "--png", "x.png"]) == 0
    capsys.readouterr()
    full_disk(refused, folder, "--png", ("simulate", "x.yaml", "--png"))


COMMANDS = typer.main.get_command(app).commands


def full_disk(refused, folder, argument, argv):
    error = refused(*argv, "/dev/full")
    assert error == f"error: {argument} is /dev/full: No space left on device; expected a writable file\n"
    # A file of another kind is refused before.
    suffix = COMMANDS[argv[0]].outputs[argument.strip("-").lower()].suffix
    out, content = folder / f"out{suffix}", KINDS[suffix][0] + b" before"
    out.write_bytes(content)
    before = sorted(folder.iterdir())
    # A file size limit fails in the same calls as a full disk, and within a file.
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        error = refused(*argv, out.name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert error == f"error: {argument} is {out.name}: File too large; expected a writable file\n"
    assert out.read_bytes() == content
    assert sorted(folder.iterdir()) == before


RECORDED = str(Path(__file__).parent / "recorded" / "stat.pt")

PRINTS = (
    pytest.param(("plan", "counts.npy", "--balancer", "plain"), id="table"),
    pytest.param(("plan", "counts.npy", "--balancer", "plain", "--json"), id="json", marks=pytest.mark.thorough),
    pytest.param(("--version",), id="version", marks=pytest.mark.thorough),
    pytest.param(("convert", RECORDED, "--ranks", "2", "--out", "x.npz"), id="text", marks=pytest.mark.thorough),
)


@pytest.mark.slow
@pytest.mark.parametrize("argv", PRINTS)
def test_no_room_for_what_is_printed_is_one_line(inputs, argv):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "jax_moe_lb.cli", *argv]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    line = "error: standard output cannot be written: No space left on device; expected room for the answer\n"
    assert ended.stderr == line


@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_plans_are_read_from_regular_files(kind):
    os.mkfifo("x.npz")
    with pytest.raises(ValueError, match="not a regular file; expected one"):
        Plan.load("/dev/zero" if kind == "device" else "x.npz")


def test_tokens_that_wrap_round_are_not_simulated_as_few():
    cluster = Cluster((Links("gpu", 4, 1e10),))
    model = ModelShape(2, 64, 128, 8, 2, 17179869248)
    with pytest.raises(ValueError, match="tokens is 17179869248; expected at most 268435455 with 2 experts per token"):
        skewed_counts(model, 4, 1.0, 1)
    # In int32 these would wrap to the 16 per expert of 64 tokens.
    with pytest.raises(ValueError, match="counts sum to 137438953984 tokens; expected at most 2147483647"):
        simulate(plain(), model, cluster, np.full((1, 4, 8), 2**32 + 16))


def test_the_sweep_of_tokens_leaves_out_what_does_not_fit_32_bits():
    """On 4096 ranks the largest sweep point would exceed the planners' int32 counts."""
    cluster, model = Cluster((Links("gpu", 4, 1e10),)), ModelShape(1, 8, 8, 8, 4, 1)
    load = Workload("all", np.full((1, 4, 8), 2**14, np.int32))
    candidate = Candidate("plain", plain())
    assert pays_from(candidate, candidate, model, cluster, load, Step()) is None


def test_messages_are_one_line_that_a_terminal_can_show(capsys):
    print_error(f"--system is '\x1b[2J{'x' * 10_000}'\n; expected another")
    said = capsys.readouterr().err
    assert said.startswith("error: --system is '\\x1b[2Jxxx")
    assert said.endswith("; expected another\n")
    assert len(said) < 600


def test_values_of_any_length_are_shown_short():
    assert shown("9" * 5000).count("9") == 53
    assert len(shown([0] * 5000)) == 60
    assert shown(10**5000) == "an integer of 16610 bits"
    assert shown(10**30) == "1000000000000000000000000000000"


@pytest.mark.parametrize("text", ["1e1000000000 GB/s", "1" * 10**6 + " GB/s", "e" * 10**6, " " * 10**6])
def test_a_quantity_is_read_at_once(text):
    start = time.process_time()
    with pytest.raises(ValueError, match="expected a rate above 0 with its unit"):
        units.rate(text)
    assert time.process_time() - start < 1


def test_what_is_usual_is_still_read(capsys, folder):
    for name in preset_names():
        assert load_config("CONFIG", name).version == 1
    # Anchors sharing a few values keep their YAML semantics.
    shared = CONFIG.replace("model: {", "model: &model {") + "routing: {seed: 3}\n"
    (folder / "x.yaml").write_text(shared.replace("layers: 2", "<<: {layers: 2}"))
    assert load_config("CONFIG", "x.yaml").model.layers == 2
    np.savez("counts.npz", counts=np.ones((4, 8), int), other=np.ones(3), steps=np.arange(2))
    assert main(["plan", "counts.npz", "--balancer", "plain", "--expert-bytes", "1000000000000"]) == 0
    assert "8" in capsys.readouterr().out
