"""Update the documents: `python -m benchmarks.render`."""

from benchmarks.render.documents import main

if __name__ == "__main__":
    main()
