"""Commands: `python -m benchmarks.papers NAME`."""

from benchmarks.render.commands import run

if __name__ == "__main__":
    run("papers")
