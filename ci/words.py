"""Count words of unclear sentences in docstrings, comments, messages and pages.

    python ci/words.py                                  # every part of this checkout; fails above a limit
    python ci/words.py .venv/lib/python3.12/site-packages/optax   # the same counts for other code

Counts are per 1,000 words; `long` is the share of sentences above 25 words.
"""

import argparse
import ast
import io
import math
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
COUNTED = {
    "what": re.compile(r"\bwhat(ever)?\b", re.I),
    "where": re.compile(r"\bwhere\b", re.I),
    "that": re.compile(r"\bthat\b", re.I),
    "nobody": re.compile(r"\b(nobody|nothing|no one|anything)\b", re.I),
    "its": re.compile(r"\b(its|their)\b", re.I),
    "each": re.compile(r"\beach\b", re.I),
    "those": re.compile(r"\bthose\b", re.I),
}
LIMITS = {"what": 1.0, "where": 2.5, "that": 9.0, "nobody": 0.5, "long": 0.1}
"""Near the counts of docstrings in optax 0.2.8 (0.15, 2.4, 8.4, 0, 0.04) and flax 0.12.12 (0.1, 1.3, 8.1, 0.04, 0.06).

Counts of few words vary more, so a part also passes with at most `MIN_HITS` of a word.
"""

PACKAGE_LIMITS = {"its": 11.6, "each": 9.3, "those": 2.5}
"""Limits for docstrings of the package. Lower them as the counts fall; flax has 1.7, 2.5 and 0.1."""

MIN_HITS = 2

MAX_WORDS = 25
CODE = re.compile(r"`[^`]*`|\$[^$]*\$|<[^>]*>|\]\([^)]*\)|https?://\S+")
BREAK = re.compile(r"\n\s*\n|\n\s*(?=[-*|#>]|\d+\. )|\n(?=\s*\*{0,2}\w+: )|(?<=[.!?:;])\s+")


def docstrings(tree: ast.AST) -> Iterator[str]:
    """Yield the strings that stand as statements: docstrings of modules, classes, functions and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def messages(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of `raise` statements and of arguments named `help`."""
    for node in ast.walk(tree):
        found = [node.exc] if isinstance(node, ast.Raise) else []
        if isinstance(node, ast.Call):
            found += [keyword.value for keyword in node.keywords if keyword.arg == "help"]
        for value in filter(None, found):
            parts = [
                one.value for one in ast.walk(value) if isinstance(one, ast.Constant) and isinstance(one.value, str)
            ]
            yield " ".join(parts)


def comments(source: str) -> str:
    """Return the comments of Python; lines that follow each other are one text."""
    lines, last = [], -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"# ?(noqa|type:|ruff|!)", token.string):
            lines.append(("" if token.start[0] == last + 1 else "\n\n") + token.string.lstrip("# "))
            last = token.start[0]
    return "\n".join(lines)


def c_comments(source: str) -> str:
    """Return the comments of C++."""
    return "\n".join(
        "\n\n" + one if start else one for start, one in re.findall(r"(^|\n\s*\n|;|\{)?\s*//+ ?(.*)", source)
    )


def prose(text: str) -> str:
    """Return a text without code, tables and formulas."""
    text = re.sub(r"^ *(```|~~~).*?^ *\1", "\n", text, flags=re.S | re.M)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    kept = [line for line in text.split("\n") if not re.match(r"\s*(>>>|\.\.\. |\||\.\. )|    {4,}\S", line)]
    return CODE.sub(" x ", "\n".join(kept))


def texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the texts of a file, each with its kind."""
    source = path.read_text(errors="replace")
    if path.suffix == ".md":
        yield "pages", source
    elif path.suffix in (".py", ".pyi"):
        tree = ast.parse(source)
        yield from (("docstrings", one) for one in docstrings(tree))
        yield from (("messages", one) for one in messages(tree))
        yield "comments", comments(source)
    else:
        yield "comments", c_comments(source)


def count(found: list[str]) -> dict[str, float]:
    """Return the counts of some texts, and how many words they have."""
    words, hits, sentences, long = 0, dict.fromkeys(COUNTED, 0), 0, 0
    for text in map(prose, found):
        words += len(re.findall(r"[A-Za-z]+", text))
        for name, pattern in COUNTED.items():
            hits[name] += len(pattern.findall(text))
        for sentence in BREAK.split(text):
            size = len(re.findall(r"[\w'/-]+", sentence))
            sentences += size > 2
            long += size > MAX_WORDS
    return {
        "words": words,
        **{name: 1000 * n / max(words, 1) for name, n in hits.items()},
        "long": long / max(sentences, 1),
    }


def files(folder: Path) -> list[Path]:
    """Return the files of a folder with prose, or the one file."""
    kinds = {".md", ".py", ".pyi", ".cc", ".h", ".cu"}
    found = [folder] if folder.is_file() else sorted(folder.rglob("*"))
    return [path for path in found if path.suffix in kinds and path.is_file()]


def rooms() -> dict[str, list[Path]]:
    """Return the parts of this checkout."""
    parts = {
        "README": [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"],
        "docs": files(ROOT / "docs"),
    }
    for package in ("jax_moe_lb", "models"):
        for folder in sorted({path.parent for path in files(ROOT / package)}):
            parts[str(folder.relative_to(ROOT))] = [path for path in files(folder) if path.parent == folder]
    return parts | {name: files(ROOT / name) for name in ("ffi", "tests", "benchmarks", "examples", "ci")}


def main() -> None:
    """Print the counts; exit with 1 if one is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders; this checkout by default, with limits")
    args = parser.parse_args()
    parts = {str(path): files(path) for path in args.paths} or rooms()
    names = [*COUNTED, "long"]
    print(f"{'part':<28}{'kind':<12}{'words':>8}" + "".join(f"{name:>9}" for name in names))
    above = []
    for part, paths in parts.items():
        found: dict[str, list[str]] = {}
        for path in paths:
            for kind, text in texts(path):
                found.setdefault(kind, []).append(text)
        for kind, some in found.items():
            counts = count(some)
            if counts["words"] < 200:
                continue
            limits = LIMITS | (PACKAGE_LIMITS if kind == "docstrings" and part.startswith("jax_moe_lb") else {})
            few = {name: counts[name] * counts["words"] <= 1000 * MIN_HITS for name in COUNTED}
            passes = {name: counts[name] <= limits.get(name, math.inf) or few.get(name, False) for name in names}
            marks = {name: not passes[name] and not args.paths for name in names}
            above += [f"{part} {kind}: {name} {counts[name]:.2f} > {limits[name]}" for name in names if marks[name]]
            row = "".join(f"{counts[name]:>8.2f}{'*' if marks[name] else ' '}" for name in names)
            print(f"{part:<28}{kind:<12}{counts['words']:>8.0f}{row}")
    if above:
        print(*above, sep="\n", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
