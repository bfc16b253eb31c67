"""Check every claim about NVIDIA GPUs on this machine; see `session`."""

from benchmarks.gpu.session import main

if __name__ == "__main__":
    main()
