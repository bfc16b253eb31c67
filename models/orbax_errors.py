"""What Orbax and TensorStore say about errors, in the words of the system and once."""

import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


def keep_quiet() -> None:
    """Keeps off stderr what Orbax and TensorStore print about errors, pages of it; they raise them too."""
    # Orbax also warns of its own future, at every start.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    if getattr(sys.unraisablehook, "func", None) is not _tell_unraisable:
        sys.unraisablehook = partial(_tell_unraisable, sys.unraisablehook)


def _tell_unraisable(before: Callable[[Any], None], unraisable: Any) -> None:
    # After one file has failed, threads of TensorStore tell of the others a loop that has ended.
    if str(unraisable.exc_value) != "Event loop is closed":
        before(unraisable)


@contextmanager
def system_errors() -> Iterator[None]:
    """Makes errors of the system out of those of TensorStore, which are of another type and name the system's code.

    Raises:
        OSError: the system refused a file; its number is that of the system.
    """
    try:
        yield
    except ValueError as error:
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from error
