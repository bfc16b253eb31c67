"""Commit of a run of a benchmark, and a check that stored commits are in the history."""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]

SOURCES = ("jax_moe_lb", "ffi", "models", "benchmarks", ":!benchmarks/results", ":!benchmarks/*.md")
"""Paths that decide a result."""

MAIN = ("origin/HEAD", "origin/main", "main")
"""Names of the main branch; the first one that exists counts."""

NO_COMMIT = "not kept"
"""Commit of a result whose commit is unknown."""

HASH = re.compile(r"([0-9a-f]{7,40})\+?")


def commit_of_run(root: Path = ROOT) -> str:
    """Return the newest commit of the main branch in this tree, with a plus sign if the sources have changes to it."""
    # Commits of other branches may be rewritten before they are merged, and then a result would name a missing one.
    bases = (_git(root, "merge-base", "HEAD", name) for name in MAIN)
    base = next((found for found in bases if found), None) or _git(root, "rev-parse", "HEAD")
    if base is None or not _is_repository(root):
        return NO_COMMIT
    return base[:10] + ("+" if _git(root, "diff", "--name-only", base, "--", *SOURCES) else "")


def missing_commits(commits: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return the commits that are not in the history of this tree; none if the whole history is not there."""
    if not _is_repository(root) or _git(root, "rev-parse", "--is-shallow-repository") != "false":
        return []
    history = (_git(root, "rev-list", "HEAD") or "").split()
    named = {commit: match[1] for commit in sorted(set(commits)) if (match := HASH.fullmatch(commit))}
    return [commit for commit, start in named.items() if not any(one.startswith(start) for one in history)]


def _is_repository(root: Path) -> bool:
    """Return whether a folder is the root of a checkout, not unpacked sources, even inside another checkout."""
    top = _git(root, "rev-parse", "--show-toplevel")
    return top is not None and Path(top).resolve() == root.resolve()


def _git(root: Path, *arguments: str) -> str | None:
    """Return the output of git; `None` if it fails or is not installed."""
    try:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
