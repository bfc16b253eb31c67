"""Mutations of the bytes of a file, raw and inside of its format."""

import io
import random
import re
import struct
import warnings
import zipfile

MOST_BYTES = 2**20
"""Maximum size of a mutated file."""

NUMBERS = (0, 1, -1, 2, 127, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
WORDS = (
    b"0", b"-1", b"1e400", b"NaN", b"-Infinity", b"1.5", b"9223372036854775808", b"4294967296", b"1000000000",
    b"9" * 5000, b"null", b"true", b"[]", b"{}", b'""', b'"----"', b"[" * 3000, b'{"a":' * 3000, b"'\\u0000'", b"None",
)  # fmt: skip


def span(rng: random.Random, content: bytes) -> tuple[int, int]:
    """Return the ends of a random block, short ones more often."""
    start = rng.randrange(len(content) + 1)
    return start, min(len(content), start + rng.choice((1, 2, 4, 8, 16, 64, 256, 1024)))


def flip(rng, content):
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 8, 64))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(rng, content):
    return content[: rng.randrange(len(content))]


def behead(rng, content):
    return content[rng.randrange(len(content)) :]


def delete(rng, content):
    start, stop = span(rng, content)
    return content[:start] + content[stop:]


def repeat(rng, content):
    start, stop = span(rng, content)
    times = min(rng.choice((2, 3, 10, 1000, 10**5)), MOST_BYTES // max(stop - start, 1))
    return content[:start] + content[start:stop] * times + content[stop:]


def swap(rng, content):
    (first, middle), (start, stop) = sorted((span(rng, content), span(rng, content)))
    middle = min(middle, start)
    return content[:first] + content[start:stop] + content[middle:start] + content[first:middle] + content[stop:]


def overwrite(rng, content):
    """Copy a block over another."""
    (start, stop), (to, _) = span(rng, content), span(rng, content)
    return content[:to] + content[start:stop] + content[to + stop - start :]


def insert(rng, content):
    at = rng.randrange(len(content) + 1)
    return content[:at] + rng.randbytes(rng.choice((1, 4, 16, 256))) + content[at:]


def forge_integer(rng, content):
    """Overwrite bytes by an integer, as in a length."""
    size = rng.choice((1, 2, 4, 8))
    at = rng.randrange(max(len(content) - size, 0) + 1)
    number = rng.choice((*NUMBERS, len(content), len(content) + 1, len(content) - at)) % 2 ** (8 * size)
    return content[:at] + number.to_bytes(size, rng.choice(("little", "big"))) + content[at + size :]


def forge_text(rng, content):
    """Replace a number or a text in a text by another value."""
    found = list(re.finditer(rb"-?\d+(\.\d+)?|\"[^\"]{0,40}\"|\b[a-z_]+\b", content))
    if not found:
        return forge_integer(rng, content)
    one = rng.choice(found)
    return content[: one.start()] + rng.choice((*WORDS, rng.choice(found).group())) + content[one.end() :]


RAW = (flip, flip, truncate, behead, delete, repeat, swap, overwrite, insert, forge_integer, forge_text, forge_text)


def raw(rng, content):
    return rng.choice(RAW)(rng, content) if content else rng.randbytes(rng.randrange(1, 64))


def in_numpy(rng, content):
    """Change the text of an array's header and pad it to its length."""
    length = int.from_bytes(content[8:10], "little")
    if content[:6] != b"\x93NUMPY" or len(content) < 10 + length:
        return raw(rng, content)
    header = forge_text(rng, content[10 : 10 + length].rstrip())
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return content[:8] + struct.pack("<H", len(header) % 2**16) + header + content[10 + length :]


def in_archive(rng, content):
    """Change a member and write an archive with matching checksums."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return repacked(rng, [(info, archive.read(info)) for info in archive.infolist()])
    except Exception:  # an archive mutated before, or names that none can have
        return raw(rng, content)


def repacked(rng, members):
    number, packed = rng.randrange(len(members)), io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, (info, value) in enumerate(members):
            how = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)) if rng.random() < 0.1 else info.compress_type
            name = raw(rng, info.filename.encode()).decode(errors="replace") if rng.random() < 0.02 else info.filename
            archive.writestr(name, inside(rng, value) if i == number else value, how)
            if rng.random() < 0.02:
                archive.writestr(name, value, how)
    return packed.getvalue()


def in_safetensors(rng, content):
    """Change the header and its length."""
    length = int.from_bytes(content[:8], "little")
    if not 0 < length <= len(content) - 8:
        return raw(rng, content)
    header = inside(rng, content[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def inside(rng, content):
    """Change a file by its format, or its bytes."""
    if content.startswith(b"PK") and rng.random() < 0.7:
        return in_archive(rng, content)
    if content.startswith(b"\x93NUMPY") and rng.random() < 0.6:
        return in_numpy(rng, content)
    if content[8:9] == b"{" and rng.random() < 0.7:
        return in_safetensors(rng, content)
    return raw(rng, content)


def mutated(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """Return a changed file.

    Args:
        rng: source of randomness.
        content: a valid file.
        other: a valid file of another kind, which may replace it.
    """
    if rng.random() < 0.02:
        return rng.choice((b"", other, content + other, rng.randbytes(rng.randrange(4096))))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        content = inside(rng, content)[:MOST_BYTES]
    return content
