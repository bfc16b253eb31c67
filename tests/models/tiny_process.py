"""`tests.models.tiny_training` as one of several processes: `python -m tests.models.tiny_process`."""

from benchmarks.training.local_gloo import bind_gloo
from tests.models.tiny_training import main

if __name__ == "__main__":
    bind_gloo()
    main()
