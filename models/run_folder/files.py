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

RESUMING = "once it can, --resume goes on from the newest checkpoint, if there is one"
"""So ends a line about what cannot be written."""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file aside and renames it, so that whoever is killed meanwhile leaves the file as it was.

    Args:
        path: the file.
        content: all that it shall hold.

    Raises:
        OSError: it cannot be written; the error names the file.
    """
    aside = part(path)
    try:
        with naming(path), aside.open("wb") as file:
            file.write(content)
            file.flush()
            # A rename may reach the disk before the content does.
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        # Whoever has to make room on a full disk shall find nothing that is of no use.
        aside.unlink(missing_ok=True)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give errors of writing a file its name, which that of a full disk lacks.

    Args:
        path: the file or folder that is written.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def in_words(error: OSError) -> str:
    """Says in a line what a training run could not write, and how to go on.

    Args:
        error: what the run ended with. Where it names no file it is one of standard output, to which nothing more is
            written then.
    """
    where = repr(error.filename) if error.filename else "standard output"
    if not error.filename:
        # The interpreter's last flush must not complain of what is still to be printed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return f"{where} cannot be written: {error.strerror}; {RESUMING}"


def part(path: Path) -> Path:
    """Name the file in which `write_whole` prepares another."""
    return path.with_name(f"{path.name}.part")


def free_sibling(path: Path, word: str) -> Path:
    """Find a name beside a path that is not taken: `<path>.<word>-1`, or with the next number.

    Args:
        path: a file or folder.
        word: what its sibling is to it.
    """
    whole, number = path.resolve(), 1
    while (sibling := whole.with_name(f"{whole.name}.{word}-{number}")).exists():
        number += 1
    return sibling


def move_into(folder: Path, paths: Iterable[Path]) -> None:
    """Move those of the files and folders that exist into a new folder, in the order given.

    Args:
        folder: the folder, which does not exist yet.
        paths: what is moved; it keeps its name.
    """
    folder.mkdir()
    for path in paths:
        if path.exists():
            # Unlike a rename it also leaves a file system, as it must where the folder of the run is a mount.
            shutil.move(path, folder / path.name)


class FolderLock:
    """This lock keeps other processes from writing into a folder; it goes with the process, however that ends.

    Args:
        folder: the folder, which exists; the lock is a file in it that stays there.

    Raises:
        BlockingIOError: another holds the lock.
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self.file = (folder / ".lock").open("a")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.file.close()
            raise

    def release(self) -> None:
        """Let others have the folder."""
        self.file.close()


CHECKSUMS = "sha256.json"


def write_checksums(checkpoint: Path) -> None:
    """Write the checksums of all files of a complete checkpoint beside them.

    Args:
        checkpoint: the folder of the checkpoint.

    Raises:
        OSError: a file cannot be read, or the checksums cannot be written.
    """
    write_whole(checkpoint / CHECKSUMS, json.dumps(_checksums(checkpoint), indent=2).encode())


def has_checksums(checkpoint: Path) -> bool:
    """Says whether the files of a checkpoint can be compared; a run that was killed early may have left none."""
    return (checkpoint / CHECKSUMS).exists()


def damage(checkpoint: Path) -> str | None:
    """Says what is wrong with the files of a checkpoint, and `None` if they are as they were written.

    Args:
        checkpoint: the folder of the checkpoint.
    """
    try:
        expected, found = dict(json.loads((checkpoint / CHECKSUMS).read_bytes())), _checksums(checkpoint)
    except FileNotFoundError:
        # The run was killed between the two, or is older than checksums are. The checkpoint itself is complete.
        return None
    except (OSError, TypeError, ValueError):
        return f"{CHECKSUMS} cannot be read"
    differing = [name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name)]
    return f"{differing[0]} is not as it was written" if differing else None


def _checksums(checkpoint: Path) -> dict[str, str]:
    """Compute the SHA-256 of each file of a checkpoint, by its path in it."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and not path.name.startswith(CHECKSUMS))
    sums = {}
    for path in files:
        with path.open("rb") as file:
            sums[str(path.relative_to(checkpoint))] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums
