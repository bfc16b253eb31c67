"""Every test runs on 8 virtual CPU devices, with strict promotion and checked shape annotations."""

import gc
import os
import tempfile

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Collections walk through all that JAX has traced; fewer of them save a twentieth of the time.
gc.set_threshold(100_000, 20, 20)

# Before anything imports the package, and for as long as the tests run.
install_import_hook("jax_moe_lb", "beartype.beartype")

# Compiling takes longer than running here; without optimisations, two thirds as long.
QUICKLY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICKLY}".strip()

from jax_moe_lb import use_virtual_cpu_devices  # noqa: E402 (after the hook)
from jax_moe_lb.kernels.backends import FIRST_WITH_HOPPER_KERNELS  # noqa: E402

use_virtual_cpu_devices(8)

# Kernels that are written for the Pallas of a newer JAX, and its interpreter.
collect_ignore = [] if jax.__version_info__ >= FIRST_WITH_HOPPER_KERNELS else ["kernels/test_hopper.py"]


def pytest_addoption(parser):
    group = parser.getgroup("random layer test", "tests/stress")
    group.addoption("--layer-cases", type=int, default=300, help="how many random inputs the layer is tested on")
    group.addoption("--layer-case", metavar="P.I", help="only the input of this number of the program of this number")


def pytest_configure(config):
    # Tests that start one training after the other compile it once; what they compile themselves they compile anew.
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="compiled-")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder.name
        config.add_cleanup(folder.cleanup)
    jax.config.update("jax_enable_compilation_cache", False)
    # Tests of a GPU run alone; no other test may depend on one.
    if config.option.markexpr != "gpu":
        jax.config.update("jax_platforms", "cpu")


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


ABSENT = {"gpu", "netns"}
"""Markers of hardware or privilege whose absence excuses a skip in continuous integration."""


def pytest_runtest_logreport(report):
    if report.skipped and not ABSENT & set(report.keywords):
        UNEXCUSED.append(report.nodeid)


UNEXCUSED: list[str] = []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """A test that was skipped asserted nothing."""
    # What the end of a process would collect, for longer than it is given, goes with the process.
    gc.freeze()
    if UNEXCUSED and os.environ.get("CI"):
        print(f"\nskipped without a marker of {sorted(ABSENT)}: {UNEXCUSED}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
