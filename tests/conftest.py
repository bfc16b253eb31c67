"""Every test runs on 8 virtual CPU devices, with strict promotion and checked shape annotations."""

import gc
import hashlib
import os
import platform
import tempfile
from pathlib import Path

import jax
import jaxlib
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.stages import Lowered
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
    parser.addoption(
        "--compilation-cache",
        metavar="FOLDER",
        help="compiled programs, by default in build/compiled; an empty name compiles all of them in each process",
    )
    group = parser.getgroup("random layer test", "tests/stress")
    group.addoption("--layer-cases", type=int, default=300, help="how many random inputs the layer is tested on")
    group.addoption("--layer-case", metavar="P.I", help="only the input of this number of the program of this number")


MAX_CACHE_BYTES = 2**30


def remove_oldest(folder):
    """Remove the files that were written first, beyond the size of the cache."""
    files = [(path.stat().st_mtime, path.stat().st_size, path) for path in folder.glob("*")]
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= MAX_CACHE_BYTES:
            break
        path.unlink(missing_ok=True)
        total -= size


def enable_compilation_cache(config):
    """Share compiled programs among the tests, their subprocesses, the workers of pytest-xdist and later runs."""
    kept = config.option.compilation_cache
    if kept == "":
        temporary = tempfile.TemporaryDirectory(prefix="compiled-")
        config.add_cleanup(temporary.cleanup)
        folder = temporary.name
    elif kept is None and "JAX_COMPILATION_CACHE_DIR" in os.environ:
        folder = os.environ["JAX_COMPILATION_CACHE_DIR"]
    else:
        name = f"jaxlib-{jaxlib.__version__}-{cpu_type()}"
        folder = str(config.rootpath / (kept or "build/compiled") / name)
        if not hasattr(config, "workerinput"):
            remove_oldest(Path(folder))
    # Loading a program takes about as long as a shorter compilation.
    least_s = os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float(least_s))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_enable_compilation_cache", kept != "")
    Lowered.compile = compile_with_dumps


compile_lowered = Lowered.compile


def compile_with_dumps(lowered, compiler_options=None, **options):
    """Compile without the cache if dumps are asked for: a program that is loaded writes none."""
    if "xla_dump_to" not in (compiler_options or {}):
        return compile_lowered(lowered, compiler_options, **options)
    before = jax.config.jax_enable_compilation_cache
    try:
        # Whether the cache is used is looked up once.
        compilation_cache.reset_cache()
        jax.config.update("jax_enable_compilation_cache", False)
        return compile_lowered(lowered, compiler_options, **options)
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def cpu_type() -> str:
    """Return a name of the processor and its instruction sets: programs compiled for one may not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.machine(), platform.processor()]
    # Without clock rates, which change.
    kept = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))} or set(lines)
    return hashlib.sha256("\n".join(sorted(kept)).encode()).hexdigest()[:12]


def pytest_configure(config):
    enable_compilation_cache(config)
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
    note_budget(report)


UNEXCUSED: list[str] = []


BUDGET_S = 10.0
"""CPU seconds of the setup and call of one test, with the processes that it has started and waited for.

Fixtures that several tests share do not count.
"""

BEGAN_S = pytest.StashKey[float]()
SHARED_S: list[float] = []
"""CPU seconds of the fixtures that several tests share, of those that were made for the test that runs."""

OVER_BUDGET: list[tuple[float, str, bool]] = []


def cpu_seconds() -> float:
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    began_s = cpu_seconds()
    try:
        return (yield)
    finally:
        if fixturedef.scope != "function":
            SHARED_S.append(cpu_seconds() - began_s)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    SHARED_S.clear()
    item.stash[BEGAN_S] = cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    # Workers of pytest-xdist send user properties to the process that prints them.
    if call.when == "call":
        item.user_properties.append(("cpu_s", cpu_seconds() - item.stash[BEGAN_S] - sum(SHARED_S)))
    return (yield)


def note_budget(report):
    seconds = dict(report.user_properties).get("cpu_s", 0.0)
    if report.when == "call" and seconds > BUDGET_S:
        OVER_BUDGET.append((seconds, report.nodeid, "thorough" in report.keywords))


def pytest_terminal_summary(terminalreporter):
    if OVER_BUDGET:
        terminalreporter.section(f"tests above {BUDGET_S:g} CPU seconds")
    for seconds, nodeid, thorough in sorted(OVER_BUDGET, reverse=True):
        terminalreporter.write_line(f"{seconds:6.1f} s{' (thorough)' if thorough else ''} {nodeid}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Fail in continuous integration if a test was skipped, or far exceeded its budget and is not marked thorough."""
    # What the end of a process would collect, for longer than it is given, goes with the process.
    gc.freeze()
    if UNEXCUSED and os.environ.get("CI"):
        print(f"\nskipped without a marker of {sorted(ABSENT)}: {UNEXCUSED}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    # CPU seconds of one test vary between machines and runs, by up to a factor of two.
    over = [nodeid for seconds, nodeid, thorough in OVER_BUDGET if seconds > 3 * BUDGET_S and not thorough]
    if over and os.environ.get("CI"):
        print(f"\nabove {3 * BUDGET_S:g} CPU seconds without the marker thorough: {over}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
