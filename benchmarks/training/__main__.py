"""Commands: `python -m benchmarks.training NAME`."""

from benchmarks.render.commands import run

if __name__ == "__main__":
    run("training")
