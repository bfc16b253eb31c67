"""Commits of results are in the history."""

import subprocess

import pytest

from benchmarks.render.documents import missing
from benchmarks.render.history import NO_COMMIT, commit_of_run, missing_commits


@pytest.fixture
def checkout(tmp_path):
    """A checkout with a main branch of two commits."""
    root = tmp_path / "checkout"
    root.mkdir()
    git(root, "init", "--initial-branch=main")
    for number in (1, 2):
        commit(root, "jax_moe_lb/layer.py", f"number = {number}\n")
    return root


def git(root, *arguments):
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    command = ["git", *author, *arguments]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def commit(root, name, text):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
    git(root, "add", ".")
    git(root, "commit", "--message", text)
    return head(root)


def head(root):
    return git(root, "rev-parse", "HEAD")[:10]


def test_commits_of_all_results_are_in_the_history():
    assert missing() == []


def test_a_run_names_the_commit_of_its_sources(checkout):
    assert commit_of_run(checkout) == head(checkout)
    (checkout / "benchmarks/results").mkdir(parents=True)
    commit(checkout, "benchmarks/results/a.json", "{}\n")
    (checkout / "benchmarks/results/a.json").write_text("{1}\n")
    assert commit_of_run(checkout) == head(checkout)
    (checkout / "jax_moe_lb/layer.py").write_text("number = 3\n")
    assert commit_of_run(checkout) == f"{head(checkout)}+"


def test_a_run_of_a_branch_names_the_commit_of_the_main_branch(checkout):
    main = head(checkout)
    git(checkout, "switch", "--create", "other")
    commit(checkout, "docs/page.md", "a page\n")
    assert commit_of_run(checkout) == main
    commit(checkout, "models/train.py", "steps = 1\n")
    assert commit_of_run(checkout) == f"{main}+"


def test_a_rewritten_commit_is_missing(checkout):
    first, second = git(checkout, "rev-parse", "HEAD~1")[:10], head(checkout)
    git(checkout, "commit", "--amend", "--message", "another subject")
    named = [first, f"{first}+", f"{head(checkout)}+", second, f"{second}+", NO_COMMIT]
    assert missing_commits(named, checkout) == [second, f"{second}+"]


def test_without_the_whole_history_no_commit_is_missing(checkout, tmp_path):
    shallow, sources = tmp_path / "shallow", checkout / "build" / "sources"
    git(tmp_path, "clone", "--depth", "1", f"file://{checkout}", str(shallow))
    sources.mkdir(parents=True)
    assert missing_commits(["0123456789"], checkout) == ["0123456789"]
    assert missing_commits(["0123456789"], shallow) == []
    assert missing_commits(["0123456789"], sources) == []
    assert missing_commits(["0123456789"], tmp_path) == []
    assert commit_of_run(sources) == NO_COMMIT
    assert commit_of_run(tmp_path) == NO_COMMIT


def test_without_git_no_commit_is_missing(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert missing_commits(["0123456789"], checkout) == []
    assert commit_of_run(checkout) == NO_COMMIT
