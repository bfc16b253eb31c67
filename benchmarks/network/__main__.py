"""Commands: `python -m benchmarks.network NAME`."""

from benchmarks.render.commands import run

if __name__ == "__main__":
    run("network")
