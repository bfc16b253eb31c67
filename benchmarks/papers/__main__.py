"""Commands of the papers."""

from benchmarks.commands import run

if __name__ == "__main__":
    run("papers")
