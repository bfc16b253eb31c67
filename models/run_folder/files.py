"""Atomic writes, the lock of a run folder, and checksums of checkpoint files."""

import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jax_moe_lb.core import FileLimits
from jax_moe_lb.core.checks import shown
from jax_moe_lb.core.file_limits import LimitError, parse_json, read_bytes

# End of messages about a failed write.
RESUMING = "after a fix, --resume continues from the newest checkpoint, if there is one"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: write to a temporary file, then rename it."""
    aside = part(path)
    try:
        with naming(path), aside.open("wb") as file:
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
    """Return the path of the temporary file of `write_whole`."""
    return path.with_name(f"{path.name}.part")


def free_sibling(path: Path, word: str) -> Path:
    """Return an unused sibling path: `<path>.<word>-1`, or with the next free number."""
    whole, number = path.resolve(), 1
    while (sibling := whole.with_name(f"{whole.name}.{word}-{number}")).exists():
        number += 1
    return sibling


def move_into(folder: Path, paths: Iterable[Path]) -> None:
    """Move existing files and folders into a new folder, in the given order."""
    folder.mkdir()
    for path in paths:
        if path.exists():
            # Unlike a rename, this works across file systems, as needed if the run folder is a mount point.
            shutil.move(path, folder / path.name)


class FolderLock:
    """Lock against other processes writing into a folder; the kernel releases it when the process ends."""

    def __init__(self, folder: Path) -> None:
        self.file = (folder / ".lock").open("a")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.file.close()
            raise

    def release(self) -> None:
        """Release the lock."""
        self.file.close()


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
        expected = parse_json(read_bytes(checkpoint / CHECKSUMS, limits), limits)
        if not isinstance(expected, dict):
            raise ValueError(f"{CHECKSUMS} is no JSON object; expected one")
        found = _checksums(checkpoint)
    except FileNotFoundError:
        # The run was killed before it wrote the checksums, or is older than them. The checkpoint is complete.
        return None
    except LimitError as error:
        return f"{CHECKSUMS}: {error}"
    except (OSError, ValueError):
        return f"{CHECKSUMS} cannot be read"
    differing = [name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name)]
    return f"{shown(differing[0])} is not as it was written" if differing else None


RECORD = ("step", "run_id")  # keys of the item `run` of a checkpoint that bind it to its step and its run


def misplacement(checkpoint: Path, run_id: str | None = None, limits: FileLimits = FileLimits()) -> str | None:
    """Describe how the record of a checkpoint differs from its folder; return `None` if they agree."""
    # A checkpoint without a readable record has no misplacement: see `has_record`.
    record = _record(checkpoint, limits)
    if record is None:
        return None
    step, saved_by = (record[name] for name in RECORD)
    if str(step) != checkpoint.name:
        return f"it was saved at step {shown(step)}; expected step {checkpoint.name}"
    if run_id is not None and saved_by != run_id:
        return f"it was saved by run {shown(saved_by)}; expected run {run_id!r}"
    return None


def has_record(checkpoint: Path, limits: FileLimits = FileLimits()) -> bool:
    """Return whether a checkpoint records its step and its run; those of older versions do not."""
    return _record(checkpoint, limits) is not None


def _record(checkpoint: Path, limits: FileLimits) -> dict | None:
    try:
        found = parse_json(read_bytes(checkpoint / "run" / "metadata", limits), limits)
    except (OSError, ValueError):
        # The checksums, or reading the whole checkpoint, report a damaged file.
        return None
    return found if isinstance(found, dict) and all(name in found for name in RECORD) else None


def _checksums(checkpoint: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a checkpoint, by relative path."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and not path.name.startswith(CHECKSUMS))
    sums = {}
    for path in files:
        with path.open("rb") as file:
            sums[str(path.relative_to(checkpoint))] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums
