"""`python -m tests.models.tiny_process` is `tests.models.tiny_training` as one of several processes."""

from tests.models.processes import bind_gloo
from tests.models.tiny_training import main

if __name__ == "__main__":
    bind_gloo()
    main()
