"""Commands: `python -m benchmarks.training NAME`."""

from benchmarks.commands import run

if __name__ == "__main__":
    run("training")
