"""Files are refused by their declared sizes, before memory is allocated, and an option raises the limits."""

import io
import json
import tracemalloc
import zipfile

import numpy as np
import pytest
import typer

from jax_moe_lb import Plan
from jax_moe_lb.cli import main
from jax_moe_lb.cli.app import app
from jax_moe_lb.core import FileLimits
from jax_moe_lb.core.file_limits import UNLIMITED, LimitError, open_archive, parse_json, read_bytes
from jax_moe_lb.recordings.counts_files import read_trace
from jax_moe_lb.recordings.formats import read_recording
from jax_moe_lb.recordings.yaml_file import read_yaml
from models import generate, train, upcycle

REMEDY = "Pass --file-limits {0} or limits=FileLimits().scaled({0})."


def header(shape, dtype="<i4"):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue()


def archive(path, **members):
    """Write compressed arrays, given as header and number of zero bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name, (start, num_bytes) in members.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                member.write(start)
                member.write(bytes(num_bytes))
    return path


def peak_bytes(read):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError) as refused:
            read()
        return tracemalloc.get_traced_memory()[1], str(refused.value)
    finally:
        tracemalloc.stop()


def test_the_sum_of_all_arrays_is_limited(tmp_path):
    """Arrays of 360 MB each pass a limit per array, and together have 720 MB."""
    one = header((1, 9, 10**7)), 100
    path = archive(tmp_path / "plan.npz", placement=one, quota=one)
    peak, message = peak_bytes(lambda: Plan.load(path))
    assert message == f"{path}: arrays of 720000000 bytes; expected at most 536870912. {REMEDY.format(2)}"
    assert peak < 2**24


def test_an_array_has_the_bytes_it_declares(tmp_path):
    """Headers in small files declare sizes below the limit."""
    (tmp_path / "a.npy").write_bytes(header((10, 10, 10**6)) + bytes(100))
    archive(tmp_path / "b.npz", counts=(header((1, 10, 10, 10**6)), 100))
    for path in (tmp_path / "a.npy", tmp_path / "b.npz"):
        peak, message = peak_bytes(lambda path=path: read_trace(path))
        assert "damaged" in message
        assert peak < 2**24


def test_a_forged_directory_does_not_raise_the_size_of_a_member(tmp_path):
    path = archive(tmp_path / "b.npz", counts=(header((1, 10, 10, 10**6)), 100))
    content = bytearray(path.read_bytes())
    at = content.rindex(b"PK\1\2")
    content[at + 24 : at + 28] = (4 * 10**8 + 128).to_bytes(4, "little")
    path.write_bytes(content)
    peak, message = peak_bytes(lambda: read_trace(path))
    assert "damaged" in message
    assert peak < 2**24


def test_steps_become_integers_only_if_the_counts_are_legal(tmp_path):
    """As a list, steps take nine times the bytes of the array."""
    steps = header((6 * 10**6,), "<i8"), 48 * 10**6
    path = archive(tmp_path / "c.npz", counts=(header((6 * 10**6, 1, 1, 1), "|i1"), 6 * 10**6), steps=steps)
    peak, message = peak_bytes(lambda: read_trace(path))
    assert "expected at most 131072 layers" in message
    assert peak < 1.5e8


def test_counts_without_entries_may_declare_any_number_of_steps(tmp_path):
    (tmp_path / "counts.npy").write_bytes(header((2**40, 0, 4, 8)))
    with pytest.raises(ValueError, match="expected no empty dimension"):
        read_trace(tmp_path / "counts.npy")


def test_counts_are_limited_in_their_own_dtype(tmp_path):
    np.save(tmp_path / "counts.npy", np.zeros((4, 8, 8, 64), np.int8))
    with pytest.raises(LimitError, match="counts of 65536 bytes in int32; expected at most 65000"):
        read_trace(tmp_path / "counts.npy", FileLimits(array_bytes=65_000))
    assert read_trace(tmp_path / "counts.npy", FileLimits(array_bytes=65_536)).counts.shape == (4, 8, 8, 64)


def test_recordings_are_limited_before_they_are_spread_over_ranks(tmp_path):
    line = {"step": 0, "rank": 0, "layer": 0, "block": "decoder", "top_indices": [[0, 1]]}
    (tmp_path / "router_trace_rank0.jsonl").write_text(f"{json.dumps(line)}\n" * 3)
    with pytest.raises(LimitError, match=r"router_trace_rank0.jsonl: records of 12480 bytes; expected at most 10000"):
        read_recording(tmp_path, None, 392, FileLimits(array_bytes=10_000))
    with pytest.raises(LimitError, match=r"router_trace_rank0.jsonl: a JSON text of \d+ values; expected at most 5"):
        read_recording(tmp_path, None, 392, FileLimits(values=5))
    with pytest.raises(LimitError, match="a JSON text of 51 bytes; expected at most 50"):
        read_recording(tmp_path, None, 392, FileLimits(text_bytes=50))
    assert read_recording(tmp_path, None, 392).counts.shape == (3, 1, 1, 392)


def test_json_is_limited_before_it_is_parsed():
    text = b"[" + b"{}," * 3 * 10**6 + b"0]"
    peak, message = peak_bytes(lambda: parse_json(text, FileLimits()))
    assert message == f"a JSON text of 6000002 values; expected at most 2097152. {REMEDY.format(3)}"
    assert peak < 2**20
    with pytest.raises(ValueError, match="nested too deeply; expected fewer brackets"):
        parse_json(b"[" * 200_000, FileLimits())
    with pytest.raises(ValueError, match="can't decode"):
        parse_json(b"\xff", FileLimits())


def test_files_are_limited_before_they_are_read(tmp_path):
    (tmp_path / "x").write_bytes(bytes(101))
    with pytest.raises(LimitError, match="101 bytes; expected at most 100"):
        read_bytes(tmp_path / "x", FileLimits(text_bytes=100))
    assert read_bytes(tmp_path / "x", FileLimits(text_bytes=101)) == read_bytes(tmp_path / "x", UNLIMITED) == bytes(101)
    with pytest.raises(LimitError, match="not a regular file"):
        read_bytes(tmp_path.joinpath("/dev/zero"), FileLimits())


def test_members_of_an_archive_are_counted(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as file:
        for number in range(5):
            file.writestr(str(number), b"")
    with (tmp_path / "x.zip").open("rb") as file:
        with pytest.raises(LimitError, match="an archive of 5 members; expected at most 4"):
            open_archive(file, FileLimits(members=4))
        assert len(open_archive(file, FileLimits(members=5)).infolist()) == 5


def test_a_factor_raises_every_limit():
    limits = FileLimits(3, 4, 5, 6, 7, 8, 9, 10).scaled(2)
    assert limits == FileLimits(6, 8, 10, 12, 14, 16, 18, 20)
    assert limits.directory_bytes == 12 * 512
    assert UNLIMITED.array_bytes > 2**64
    with pytest.raises(ValueError, match="factor is 0; expected at least 1"):
        limits.scaled(0)


def test_a_message_has_the_factor_of_the_option():
    limits = FileLimits().scaled(2)
    with pytest.raises(
        LimitError, match=r"^2147483649 bytes; expected at most 1073741824\. " + "Pass --file-limits 5 "
    ):
        limits.check("array_bytes", 2**31 + 1, "{} bytes")
    limits.check("array_bytes", 2**30, "{} bytes")
    with pytest.raises(LimitError, match=r"^/{x}/{}: 9 values; expected at most 8"):
        FileLimits(values=8).check("values", 9, "/{x}/{}: {} values")
    with pytest.raises(LimitError, match=r"^more than 10\^20 bytes; expected at most 1073741824$"):
        limits.check("array_bytes", 10**400, "{} bytes")


def test_commands_that_read_files_have_the_option():
    commands = typer.main.get_command(app).commands
    read = [commands[name] for name in ("plan", "replay", "drift", "convert", "simulate", "advise")]
    for command in (*read, *(typer.main.get_command(program.app) for program in (train, generate, upcycle))):
        assert "file_limits" in {option.name for option in command.params}


def test_the_option_raises_the_limits_of_a_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text("a: " + "[" * 40 + "]" * 40)
    assert main(["simulate", "x.yaml"]) == 2
    assert f"by line 1; expected at most 32. {REMEDY.format(2)}" in capsys.readouterr().err
    assert main(["simulate", "x.yaml", "--file-limits", "2"]) == 2
    assert "version is missing" in capsys.readouterr().err
    assert main(["simulate", "x.yaml", "--file-limits", "0"]) == 2
    assert "--file-limits is '0'; expected an integer, at least 1" in capsys.readouterr().err
    assert str(read_yaml(tmp_path / "x.yaml", FileLimits().scaled(2))["a"]) == "[" * 40 + "]" * 40
