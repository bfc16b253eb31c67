"""Commands: `python -m benchmarks.reliability NAME`."""

from benchmarks.render.commands import run

if __name__ == "__main__":
    run("reliability")
