"""Run every benchmark: `python -m benchmarks.reproduce`."""

from benchmarks.reproduce.runs import main

if __name__ == "__main__":
    main()
