"""Commands: `python -m benchmarks.compiled NAME`."""

from benchmarks.render.commands import run

if __name__ == "__main__":
    run("compiled")
