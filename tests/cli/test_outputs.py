"""No output of a command replaces an input, or a file of another kind, for all commands and options."""

import inspect
import os
import typing
from pathlib import Path

import pytest
import typer

from jax_moe_lb.cli.app import app
from jax_moe_lb.cli.output import KINDS, CheckedCommand, check_outputs
from models import generate, tiny_checkpoint, train, upcycle

APPS = {"models.train": train, "models.generate": generate, "models.upcycle": upcycle}
APPS |= {"models.tiny_checkpoint": tiny_checkpoint}

COMMANDS = typer.main.get_command(app).commands
COMMANDS |= {name: typer.main.get_command(module.app) for name, module in APPS.items()}

VALUES = {"per_token": "2", "balancer": "ultraep", "target": "h100:1x8", "prompt": "x", "architecture": "mixtral"}
VALUES |= {"num_experts": "8", "checkpoint": "checkpoint", "model": "model.yaml", "cluster": "cluster.yaml"}
"""Values of required arguments. Paths need no file: all checks of outputs come first."""

BYTES = b"the user's own file"


def outputs(command):
    return [parameter for parameter in command.params if parameter.name in command.outputs]


def path_inputs(command):
    """Yield the parameters whose value may name a file: those of text and of paths, but no output."""
    for name, parameter in inspect.signature(command.callback).parameters.items():
        kind = typing.get_args(parameter.annotation)[0]
        if {str, Path} & {kind, *typing.get_args(kind), *map(str_of_list, typing.get_args(kind))}:
            yield from (one for one in command.params if one.name == name and name not in command.outputs)


def str_of_list(kind):
    return typing.get_args(kind)[0] if typing.get_origin(kind) is list else None


PAIRS = [
    (name, out.name, given.name)
    for name, command in COMMANDS.items()
    for out in outputs(command)
    for given in path_inputs(command)
]


def argv(command, given):
    """Return a command line with the given values and the required ones."""
    words = []
    for parameter in command.params:
        value = given.get(parameter.name, VALUES.get(parameter.name, "absent") if parameter.required else None)
        if value is None:
            continue
        words += [value] if parameter.param_type_name == "argument" else [f"{parameter.opts[-1]}={value}"]
    return words


def refusal(name, given, capsys):
    command = COMMANDS[name]
    with pytest.raises((SystemExit, typer.Exit)) as ended:
        command.main(argv(command, given))
    assert getattr(ended.value, "code", getattr(ended.value, "exit_code", None)) == 2
    out, message = capsys.readouterr()
    assert out == ""
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    return message


def same(path, way):
    """Return another name of a file."""
    other = path.with_name(f"other{path.suffix}")
    if way == "symbolic link":
        other.symlink_to(path.name)
    elif way == "hard link":
        os.link(path, other)
    elif way == "relative path":
        return f"{path.parent.name}/../{path.parent.name}/{path.name}"
    elif way == "folder by link":
        path.parent.with_name("linked").symlink_to(path.parent.name)
        return f"linked/{path.name}"
    return str(path if way == "same path" else other)


WAYS = ("same path", "relative path", "symbolic link", "hard link", "folder by link")


def test_every_output_is_named_so_and_checked():
    for name, command in COMMANDS.items():
        assert isinstance(command, CheckedCommand), name
        for parameter in command.params:
            is_named = (parameter.help or "").startswith("Output ")
            assert (parameter.name in command.outputs) == is_named, (name, parameter.name)
    assert {name for name, *_ in PAIRS} >= {"plan", "replay", "convert", "simulate", "compile", "models.train"}
    marks = [(name, mark) for command in COMMANDS.values() for name, mark in command.outputs.items()]
    assert {mark.suffix for _, mark in marks} == {*KINDS, ""}


@pytest.mark.parametrize(("name", "out", "given"), PAIRS)
def test_an_output_that_is_an_input_is_refused(name, out, given, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for number, way in enumerate(WAYS):
        folder = tmp_path / str(number) / "folder"
        folder.mkdir(parents=True)
        monkeypatch.chdir(folder.parent)
        path = folder / "file.npy"
        path.write_bytes(BYTES)
        message = refusal(name, {given: str(path), out: same(path, way)}, capsys)
        assert "expected another path than" in message, (way, message)
        assert path.read_bytes() == BYTES


@pytest.mark.parametrize("text", ["{}:2", "data.tokenizer={}"])
def test_paths_inside_of_values_are_inputs(text, tmp_path, capsys):
    path = tmp_path / "text"
    path.write_bytes(BYTES)
    assert "expected another path than" in refusal(
        "models.train", {"data" if ":" in text else "assignments": text.format(path), "run_dir": str(path)}, capsys
    )


def test_a_file_of_an_input_folder_is_an_input(tmp_path, capsys):
    (tmp_path / "recordings").mkdir()
    path, linked = tmp_path / "recordings" / "rank_0.pt", tmp_path / "linked.npz"
    path.write_bytes(BYTES)
    os.link(path, linked)
    for out in (path, linked):
        found = refusal("convert", {"recording": str(path.parent), "out": str(out)}, capsys)
        assert "expected another path than RECORDING" in found
    assert path.read_bytes() == BYTES


def test_two_outputs_are_two_files(tmp_path, capsys):
    out = str(tmp_path / "new")
    assert "expected another path than --timeline" in refusal("simulate", {"timeline": out, "png": out}, capsys)


OTHERS = {
    "model.py": b"import numpy\n",
    "counts.npy": b"\x93NUMPY\x01",
    "notes.json": b'{"mine": 1}',
    "a.yaml": b"x: 1",
    "weights.pt": b"PK\x03\x04",
    "picture.png": b"GIF89a",
    "trace.npz": b"\x93NUMPY",
    "list": b"1\n2\n",
}
"""Files of users that are no output of a command."""


@pytest.mark.parametrize(
    ("name", "out"), [(name, one) for name in COMMANDS for one, mark in COMMANDS[name].outputs.items() if mark.suffix]
)
def test_an_existing_file_of_another_kind_is_kept(name, out, tmp_path, capsys):
    for other, content in OTHERS.items():
        path = tmp_path / other
        path.write_bytes(content)
        message = refusal(name, {out: str(path)}, capsys)
        assert "an existing file; expected a new file, or a ." in message, (other, message)
        assert path.read_bytes() == content


@pytest.mark.parametrize("suffix", KINDS)
def test_own_files_and_new_ones_are_written(suffix, tmp_path):
    own, empty = tmp_path / f"own{suffix}", tmp_path / "empty"
    own.write_bytes(KINDS[suffix][0] + b" more")
    empty.touch()
    for path in (own, empty, tmp_path / f"new{suffix}", Path("/dev/null"), Path("x" * 5000)):
        check_outputs([("INPUT", tmp_path / "other"), ("NULL", Path("/dev/null"))], [("--out", path, suffix)])
