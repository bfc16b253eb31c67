"""Commands: `python -m benchmarks.plans NAME`."""

from benchmarks.render.commands import run

if __name__ == "__main__":
    run("plans")
