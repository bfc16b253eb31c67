"""Commands: `python -m benchmarks.plans NAME`."""

from benchmarks.commands import run

if __name__ == "__main__":
    run("plans")
