"""Atomic writes, the lock of a run folder, and checksums of checkpoint files."""

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from jax_moe_lb.core import FileLimits
from jax_moe_lb.core.checks import shown
from jax_moe_lb.core.file_limits import LimitError, parse_json, read_bytes

PART = re.compile(r"(.+)\.part-[0-9a-f]{16}", re.DOTALL)

# End of messages about a failed write.
RESUMING = "after a fix, --resume continues from the newest checkpoint, if there is one"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: write to a temporary file, then rename it."""
    aside = part(path)
    # Exclusive, and outside of the block that removes it: an existing file stays as it is.
    opened = aside.open("xb")
    try:
        with naming(path), opened as file:
            file.write(content)
            file.flush()
            # Without the sync, the rename may reach the disk before the content.
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        # Leave no partial file on a full disk.
        aside.unlink(missing_ok=True)
        raise


@contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """Yield a new sibling folder, which is deleted at the end of the context unless it was renamed."""
    made = part(path)
    made.mkdir(parents=True)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def read_object(path: Path, limits: FileLimits) -> dict[str, Any]:
    """Read a JSON object; errors have its path."""
    try:
        found = parse_json(read_bytes(path, limits), limits)
    except LimitError as error:
        raise LimitError(f"{path}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object")
    return found


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to errors of writing a file; the error of a full disk lacks it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def in_words(error: OSError) -> str:
    """Return a message about a failed write of a training run, and how to resume."""
    where = repr(error.filename) if error.filename else "standard output"
    if not error.filename:
        # Otherwise the interpreter would report the failed flush of pending output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return f"{where} cannot be written: {error.strerror}; {RESUMING}"


def part(path: Path) -> Path:
    """Return a new path beside another one, for its content until it is complete."""
    # A fixed name may be that of a user's file or folder.
    return path.with_name(f"{path.name}.part-{secrets.token_hex(8)}")


def parts_in(folder: Path, names: Collection[str]) -> list[Path]:
    """Return the incomplete files and folders that killed writes to some names of a folder have left."""
    found = ((path, PART.fullmatch(path.name)) for path in folder.glob("*.part-*"))
    return sorted(path for path, match in found if match and match[1] in names)


def is_number(text: str) -> bool:
    """Return whether a text is a number as this program writes it, unlike "08" or "²"."""
    return text.isdecimal() and text == str(int(text))


def free_sibling(path: Path, word: str) -> Path:
    """Return an unused sibling path: `<path>.<word>-1`, or with the next free number."""
    whole, number = path.resolve(), 1
    while (sibling := whole.with_name(f"{whole.name}.{word}-{number}")).exists():
        number += 1
    return sibling


def make_way(folder: Path, is_own: Callable[[str], bool], tell: Callable[[str], None]) -> None:
    """Delete a folder, if there is one; move it aside if it contains files of other names, which are a user's."""
    others = [path for path in folder.glob("*") if path.is_dir() or not is_own(path.name)]
    if not others:
        shutil.rmtree(folder, ignore_errors=True)
        return
    aside = free_sibling(folder, "before")
    folder.rename(aside)
    tell(f"moved {str(folder)!r} to {str(aside)!r}, as it contains {shown(others[0].name)}")


def lock_folder(folder: Path) -> TextIO:
    """Lock a folder against other processes writing into it, until the returned file is closed or the process ends."""
    file = (folder / ".lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


CHECKSUMS = "sha256.json"


def write_checksums(checkpoint: Path) -> None:
    """Write the checksums of all files of a complete checkpoint into its folder."""
    write_whole(checkpoint / CHECKSUMS, json.dumps(_checksums(checkpoint), indent=2).encode())


def has_checksums(checkpoint: Path) -> bool:
    """Return whether a checkpoint has checksums; a run killed early may have written none."""
    return (checkpoint / CHECKSUMS).exists()


def damage(checkpoint: Path, limits: FileLimits = FileLimits()) -> str | None:
    """Describe the damage of a checkpoint; return `None` if its files match their checksums or it has none."""
    try:
        expected, found = read_object(checkpoint / CHECKSUMS, limits), _checksums(checkpoint)
    except FileNotFoundError:
        # The run was killed before it wrote the checksums. The checkpoint is complete.
        return None
    except LimitError as error:
        return str(error).removeprefix(f"{checkpoint}{os.sep}")
    except (OSError, ValueError):
        return f"{CHECKSUMS} cannot be read"
    differing = [name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name)]
    return f"{shown(differing[0])} is not as it was written" if differing else None


RECORD = ("step", "run_id")  # keys of the item `run` of a checkpoint that bind it to its step and its run


def misplacement(checkpoint: Path, run_id: str | None = None, limits: FileLimits = FileLimits()) -> str | None:
    """Describe how the record of a checkpoint differs from its folder; return `None` if they agree."""
    try:
        record = read_object(checkpoint / "run" / "metadata", limits)
        step, saved_by = (record[name] for name in RECORD)
    except (OSError, KeyError, ValueError):
        return "it does not record its step and run"
    if str(step) != checkpoint.name:
        return f"it was saved at step {shown(step)}; expected step {checkpoint.name}"
    if run_id is not None and saved_by != run_id:
        return f"it was saved by run {shown(saved_by)}; expected run {run_id!r}"
    return None


def _checksums(checkpoint: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a checkpoint, by relative path."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and not path.name.startswith(CHECKSUMS))
    sums = {}
    for path in files:
        with path.open("rb") as file:
            sums[str(path.relative_to(checkpoint))] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums
