"""Size limits of input files, and readers of bytes, JSON and archive directories within them.

Readers compare declared sizes with the limits before they allocate memory. Writers have no limits.
"""

import dataclasses
import json
import os
import stat
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BinaryFile = Any
"""File open for reading bytes. Archive members match none of the file types of `typing`."""

MOST_DIGITS = 20
"""Maximum number of digits of a size in a message."""

MOST_FACTOR = 10**6
"""Largest factor of the option `--file-limits`."""

DIRECTORY_BYTES = 512
"""Bytes of an archive's directory per member: 46 and the name."""

MOST_EXPANSION = 1040
"""Upper bound of decompressed bytes per compressed byte; DEFLATE reaches 1032."""


REMEDY = ". Pass --file-limits"
"""Start of the remedy in the message of a `LimitError`."""


class LimitError(ValueError):
    """Error for a valid file exceeding a size limit, with declared size, limit and option."""


@dataclass(frozen=True)
class FileLimits:
    """Limits of the sizes declared by one input file.

    Readers need up to four times `array_bytes` of memory, 2 GiB by default. Pass `FileLimits().scaled(factor)`, or the
    option `--file-limits`, to read a larger file from a trusted source.

    Args:
        array_bytes: bytes of all arrays read from a file, decompressed.
        text_bytes: bytes of a JSON file, a line of JSON lines, a safetensors header, a tokenizer or a pickle.
        values: values in such a text, an upper bound computed from its separators.
        members: members of an archive; its directory may have 512 bytes per member.
        yaml_bytes: bytes of a YAML file.
        yaml_values: values in a YAML file, including repetitions by aliases.
        yaml_characters: characters of a value in a YAML file.
        yaml_depth: nesting depth of values in a YAML file.

    Examples:
        >>> FileLimits().scaled(2).array_bytes == 2**30
        True
    """

    array_bytes: int = 2**29
    text_bytes: int = 2**26
    values: int = 2**21
    members: int = 2**14
    yaml_bytes: int = 2**18
    yaml_values: int = 10_000
    yaml_characters: int = 1000
    yaml_depth: int = 32

    def scaled(self, factor: int) -> "FileLimits":
        """Return the limits multiplied by a factor.

        Args:
            factor: integer of at least 1.

        Returns:
            The larger limits.

        Raises:
            ValueError: `factor` is below 1.
        """
        if factor < 1:
            raise ValueError(f"factor is {factor}; expected at least 1")
        return FileLimits(**{name: value * factor for name, value in dataclasses.asdict(self).items()})

    @property
    def directory_bytes(self) -> int:
        """Bytes of the directory of an archive."""
        return self.members * DIRECTORY_BYTES

    def check(self, field: str, declared: int, description: str) -> None:
        """Check a declared size.

        Args:
            field: name of the limit.
            declared: declared size.
            description: subject of the message, such as `"arrays of {} bytes"`; its last `{}` is the place of the size.

        Raises:
            LimitError: the size exceeds the limit.
        """
        most = getattr(self, field)
        if declared <= most:
            return
        size = str(declared) if declared < 10**MOST_DIGITS else f"more than 10^{MOST_DIGITS}"
        factor = -(-declared // getattr(FileLimits(), field))
        remedy = f"{REMEDY} {factor} or limits=FileLimits().scaled({factor})."
        # Paths before the place may have braces.
        subject = size.join(description.rsplit("{}", 1))
        raise LimitError(f"{subject}; expected at most {most}{remedy if factor <= MOST_FACTOR else ''}")


DEFAULT_LIMITS = FileLimits()
"""Default of dataclass fields."""

UNLIMITED = FileLimits().scaled(2**40)
"""Limits for files written by the same process."""


def open_regular(path: Path) -> BinaryFile:
    """Open a regular file for reading bytes."""
    # Check the file type first: opening a pipe waits for a writer.
    if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
        raise LimitError("not a regular file; expected one")
    return path.open("rb")


def read_bytes(path: Path, limits: FileLimits, field: str = "text_bytes") -> bytes:
    """Read a whole file, at most its size when opened."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        limits.check(field, size, "{} bytes")
        # Another thread may append to the file.
        return file.read(size)


def parse_json(text: bytes, limits: FileLimits) -> Any:
    """Parse JSON after checking its size and number of values."""
    limits.check("text_bytes", len(text), "a JSON text of {} bytes")
    limits.check("values", 1 + sum(map(text.count, (b",", b":", b"[", b"{"))), "a JSON text of {} values")
    try:
        return json.loads(text.decode())
    except RecursionError as error:
        raise ValueError("nested too deeply; expected fewer brackets") from error


def open_archive(file: BinaryFile, limits: FileLimits) -> zipfile.ZipFile:
    """Open a zip archive after checking the size of the directory, because zipfile reads it whole."""
    size = file.seek(0, os.SEEK_END)
    start = max(size - 2**16 - 22 - 76, 0)
    file.seek(start)
    tail = file.read()
    # Only a comment can follow the last end-of-directory signature.
    at = tail.rfind(b"PK\5\6")
    if at < 0 or len(tail) - at < 22:
        raise ValueError("no archive found; expected one")
    members, num_bytes = struct.unpack_from("<HL", tail, at + 10)
    if tail[max(at - 20, 0) : at].startswith(b"PK\6\7"):
        # Python finds the 64-bit record by its offset; it takes precedence.
        if at < 76 or struct.unpack_from("<Q", tail, at - 12)[0] != start + at - 76 or tail[at - 76 :][:4] != b"PK\6\6":
            raise ValueError("a directory at another place; expected it before its end")
        members, num_bytes = struct.unpack_from("<2Q", tail, at - 76 + 32)
    limits.check("members", members, "an archive of {} members")
    limits.check("directory_bytes", num_bytes, "an archive with a directory of {} bytes")
    file.seek(0)
    try:
        archive = zipfile.ZipFile(file)
    except OSError as error:
        # Offsets before the start of the file.
        raise ValueError("a damaged directory; expected offsets inside the file") from error
    limits.check("members", len(archive.infolist()), "an archive of {} members")
    return archive


def check_member(info: zipfile.ZipInfo, archive_bytes: int) -> None:
    """Check the sizes of an archive member against each other."""
    # Other methods may allocate memory of a size taken from the file.
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError("another compression; expected none or DEFLATE")
    if info.header_offset < 0:
        raise ValueError(f"a member at byte {info.header_offset}; expected at least 0")
    expansion = 1 if info.compress_type == zipfile.ZIP_STORED else MOST_EXPANSION
    if info.compress_size > archive_bytes or info.file_size > expansion * info.compress_size:
        raise ValueError(f"a member of {info.file_size} bytes in {info.compress_size}; expected sizes to match")
