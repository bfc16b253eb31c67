"""Invalid input gives one line on stderr, an empty stdout, and exit code 2."""

import io

import numpy as np
import pytest
import typer

from jax_moe_lb.cli import main
from jax_moe_lb.cli.app import app
from tests.cli.commands import refusal


def save(path, array):
    np.save(path, array, allow_pickle=True)
    return path.read_bytes()


ONES = np.ones((4, 8), int)
PLAIN = ("--balancer", "plain")

ARRAYS = {
    "vector": (np.ones(4, int), "(4,)"),
    "floats": (np.ones((4, 8)), "float64"),
    "booleans": (np.ones((4, 8), bool), "bool"),
    "negative": (np.where(np.arange(8) == 5, -2, ONES), "expert 5 is -2"),
    "no ranks": (np.ones((0, 8), int), "(0, 8)"),
    "no experts": (np.ones((4, 0), int), "(4, 0)"),
    "no layers": (np.ones((0, 4, 8), int), "(0, 4, 8)"),
    "indivisible": (np.ones((4, 10), int), "num_experts is 10"),
    "fewer experts than ranks": (np.ones((4, 2), int), "num_experts is 2"),
    "too many tokens": (np.full((4, 8), 2**62), "at most 2147483647"),
    "objects": (np.array([{}], object), "damaged"),
}

OPTIONS = {
    "unknown balancer": (("--balancer", "nope"), "--balancer is 'nope'; expected one of"),
    "balancer of elsewhere": (("--balancer", "../plan"), "greedy, hybridep, llep, lplb, moonep, plain, rails"),
    "no balancer": ((), "--balancer"),
    "slots beyond experts": ((*PLAIN, "--replica-slots", "7"), "--replica-slots is 7; expected at most 6, the experts"),
    "slots beyond int32": ((*PLAIN, "--replica-slots", "99999999999"), "expected an integer, from 0 to 2147483647"),
    "negative slots": ((*PLAIN, "--replica-slots", "-4"), "--replica-slots is '-4'; expected an integer, at least 0"),
    "slots in words": ((*PLAIN, "--replica-slots", "four"), "--replica-slots is 'four'; expected an integer"),
    "domain no divisor": ((*PLAIN, "--ranks-per-domain", "3"), "--ranks-per-domain is 3; expected a divisor of the 4"),
    "empty domain": ((*PLAIN, "--ranks-per-domain", "0"), "--ranks-per-domain is '0'"),
    "free experts": ((*PLAIN, "--expert-bytes", "0"), "--expert-bytes is '0'"),
    "unknown option": ((*PLAIN, "--slots", "4"), "--slots"),
    "an option twice": (
        ("--balancer", "exact:eps=0.1,eps=0.2"),
        "--balancer exact is 'exact:eps=0.1,eps=0.2'; expected every option once",
    ),
    "endless option": (("--balancer", "exact:eps=" + "-" * 60_000), "--balancer exact:eps is '---"),
    "missing folder": ((*PLAIN, "--out", "no/such/folder/plan.npz"), "--out is no/such/folder/plan.npz"),
    "a folder": ((*PLAIN, "--out", "."), "--out is .: Is a directory"),
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("command", ["plan", "replay"])
def test_arrays(capsys, tmp_path, command, name):
    array, expected = ARRAYS[name]
    if command == "replay" and array.ndim >= 2:
        array = array.reshape(1, 1, *array.shape[-2:]) if array.size else np.empty((1, 0, *array.shape[-2:]), int)
        expected = expected if array.size else "no empty dimension"
    save(tmp_path / "counts.npy", array)
    error = refusal(capsys, command, tmp_path / "counts.npy", *PLAIN)
    assert expected in error
    assert "counts.npy" in error


@pytest.mark.parametrize("shape", [(4, 8), (2, 4, 8), (1, 2, 3, 4, 8)])
def test_trace_of_another_shape(capsys, tmp_path, shape):
    save(tmp_path / "trace.npy", np.ones(shape, int))
    assert f"{shape}; expected [steps, layers, R, E]" in refusal(capsys, "replay", tmp_path / "trace.npy", *PLAIN)


@pytest.mark.parametrize("steps", [np.arange(3), np.ones(2), np.arange(4).reshape(2, 2)])
def test_steps_that_do_not_fit(capsys, tmp_path, steps):
    np.savez(tmp_path / "trace.npz", counts=np.ones((2, 1, 4, 8), int), steps=steps)
    assert "each of the 2 steps" in refusal(capsys, "replay", tmp_path / "trace.npz", *PLAIN)


def test_bad_entry_deep_in_a_trace_is_named(capsys, tmp_path):
    counts = np.ones((3, 2, 4, 8), int)
    counts[2, 1, 3, 7] = -1
    save(tmp_path / "trace.npy", counts)
    error = refusal(capsys, "replay", tmp_path / "trace.npy", *PLAIN)
    assert "step 2, layer 1: counts of rank 3, expert 7 is -1" in error


@pytest.mark.parametrize("name", OPTIONS)
def test_options(capsys, tmp_path, name):
    argv, expected = OPTIONS[name]
    save(tmp_path / "counts.npy", ONES)
    assert expected in refusal(capsys, "plan", tmp_path / "counts.npy", *argv)


@pytest.mark.parametrize("name", ["unknown balancer", "slots beyond experts", "domain no divisor"])
def test_options_of_replay(capsys, tmp_path, name):
    argv, expected = OPTIONS[name]
    save(tmp_path / "trace.npy", ONES[None, None])
    assert expected in refusal(capsys, "replay", tmp_path / "trace.npy", *argv)


def saved(write=np.savez_compressed, *arrays, **named):
    file = io.BytesIO()
    write(file, *arrays, **named)
    return file.getvalue()


NPY = saved(np.save, ONES)
NPZ = saved(counts=np.arange(3200).reshape(1, 1, 4, 800))
MIDDLE = len(NPZ) // 2
FILES = {
    "empty": (b"", "damaged"),
    "text": (b"rank,expert,tokens\n0,0,1\n", "damaged"),
    "a header alone": (b"\x93NUMPY", "damaged"),
    "an archive without end": (b"PK\x03\x04", "damaged"),
    "a truncated header": (NPY[:20], "damaged"),
    "half an array": (NPY[: len(NPY) // 2], "damaged"),
    "an array without its last byte": (NPY[:-1], "damaged"),
    "a pickle": (b"\x80\x04.", "damaged"),
    "a truncated archive": (NPZ[:MIDDLE], "damaged"),
    "a corrupt archive": (NPZ[:MIDDLE] + bytes(8) + NPZ[MIDDLE + 8 :], "damaged"),
    "no counts": (saved(load=ONES), "has arrays ['load']; expected an array named 'counts'"),
}


@pytest.mark.parametrize("name", FILES)
def test_files(capsys, tmp_path, name):
    content, expected = FILES[name]
    (tmp_path / "counts.npy").write_bytes(content)
    error = refusal(capsys, "plan", tmp_path / "counts.npy", *PLAIN)
    assert not [part for part in ("COUNTS", str(tmp_path / "counts.npy"), expected) if part not in error]


@pytest.mark.parametrize(("command", "argument"), [("plan", "COUNTS"), ("replay", "TRACE")])
def test_no_file(capsys, tmp_path, command, argument):
    assert f"{argument} is {tmp_path / 'x.npy'}: No such file" in refusal(capsys, command, tmp_path / "x.npy", *PLAIN)
    assert "directory" in refusal(capsys, command, tmp_path, *PLAIN)


@pytest.mark.parametrize("argv", [("nope",), ("plan", "--json"), ("replay", "x"), ("doctor", "extra"), ("--nope",)])
def test_usage(capsys, argv):
    refusal(capsys, *argv)


COMMANDS = typer.main.get_command(app).commands


def test_an_interrupt_of_the_imports_has_no_traceback(capsys, monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("jax_moe_lb.cli.entry.import_module", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["", *(name for name in COMMANDS if name != "doctor")])
def test_a_bare_command_prints_its_help(capsys, name):
    argv = [name] if name else []
    assert main([*argv, "--help"]) == 0
    help_text = capsys.readouterr().out
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", help_text)


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_no_help_is_cut_in_80_columns(capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([name, "--help"] if name else ["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    # The first line is click's usage, such as [ARGS]...
    assert not [line for line in lines[1:] if "..." in line or "…" in line]


def test_the_first_line_of_every_help_is_short():
    for command in COMMANDS.values():
        first = command.help.partition("\n\n")[0]
        assert len(first) <= 60
        assert first.endswith(".")
