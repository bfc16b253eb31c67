"""Checksums of a checkpoint's files say whether they are as they were written."""

import hashlib
import json
from pathlib import Path

from models.files import write_whole

CHECKSUMS = "sha256.json"


def write_checksums(checkpoint: Path) -> None:
    """Writes the checksums of all files of a complete checkpoint beside them.

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
    """Computes the SHA-256 of each file of a checkpoint, by its path in it."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and not path.name.startswith(CHECKSUMS))
    sums = {}
    for path in files:
        with path.open("rb") as file:
            sums[str(path.relative_to(checkpoint))] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums
