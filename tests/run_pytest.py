"""Run pytest under Bazel with the extension modules built by Bazel."""

import importlib.util
import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    # The import hook of an editable installation precedes sys.path.
    sys.meta_path = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
    for module in ("jax_moe_lb._ffi", "jax_moe_lb._planning"):
        found = importlib.util.find_spec(module)
        if found is None or Path(found.origin).suffixes != [".so"]:
            sys.exit(f"{module} is {found}; expected the one that Bazel built")
    sys.exit(pytest.main(["--import-mode=importlib", "-p", "no:cacheprovider", *sys.argv[1:]]))
