"""Commands: `python -m benchmarks.layer NAME`."""

from benchmarks.render.commands import run

if __name__ == "__main__":
    run("layer")
