"""`quiet_stderr` keeps off stderr what compilers log."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Keeps off stderr what compilers log, which is no part of an answer; after an error it comes out.

    A `ValueError` says itself what is wrong, so after one it stays away, too.

    Examples:
        >>> from jax_moe_lb.compiled import quiet_stderr
        >>> with quiet_stderr():
        ...     answer = 42  # a compiler may warn here
    """
    sys.stderr.flush()
    # Compilers are no Python: they write to the file itself.
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            yield
        except ValueError:
            raise
        except BaseException:
            log.seek(0)
            os.write(stderr, log.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
