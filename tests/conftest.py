"""All tests run on 8 virtual CPU devices, with strict dtype promotion and checked shape annotations."""

import gc
import hashlib
import os
import platform
import tempfile
from pathlib import Path

import jax
import jaxlib
import jaxtyping
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.stages import Lowered
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Garbage collection scans all traced JAX objects; rarer collections save 5 % of the time.
gc.set_threshold(100_000, 20, 20)

check_shapes = jaxtyping.jaxtyped


def check_outer_functions(*, typechecker):
    """Check functions of modules and classes; a nested one would be decorated again in each call of the outer one."""
    check = check_shapes(typechecker=typechecker)

    def checked(function):
        # The functions of `core.checks` run for each field of each option, and take no arrays.
        is_check = function.__module__ == "jax_moe_lb.core.checks"
        return function if "<locals>" in function.__qualname__ or is_check else check(function)

    return checked


# The hook decorates with this name. Install it before any import of the package, for the whole test session.
jaxtyping.jaxtyped = check_outer_functions
install_import_hook("jax_moe_lb", "beartype.beartype")

# Compilation dominates here; without optimisations it takes a third less time.
QUICKLY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICKLY}".strip()

from jax_moe_lb import use_virtual_cpu_devices  # noqa: E402 (after the hook)
from jax_moe_lb.core import custom_calls  # noqa: E402

use_virtual_cpu_devices(8)


def pytest_addoption(parser):
    parser.addoption(
        "--compilation-cache",
        metavar="FOLDER",
        help="Folder of compiled programs, build/compiled by default; an empty name disables the cache.",
    )
    group = parser.getgroup("fuzz test of files", "tests/fuzz")
    group.addoption("--fuzz-files", type=int, default=2000, help="Number of mutated files.")
    group.addoption("--fuzz-seed", type=int, default=0, help="Seed of the mutations.")


MAX_CACHE_BYTES = 2**30


def remove_oldest(folder):
    """Remove the oldest files above the cache size."""
    files = [(path.stat().st_mtime, path.stat().st_size, path) for path in folder.glob("*")]
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= MAX_CACHE_BYTES:
            break
        path.unlink(missing_ok=True)
        total -= size


def enable_compilation_cache(config):
    """Share compiled programs between tests, subprocesses, pytest-xdist workers and later runs."""
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
    """Compile without the cache if dumps are requested, as a cached program writes none."""
    if "xla_dump_to" not in (compiler_options or {}):
        return compile_lowered(lowered, compiler_options, **options)
    before = jax.config.jax_enable_compilation_cache
    try:
        # JAX reads the cache setting once.
        compilation_cache.reset_cache()
        jax.config.update("jax_enable_compilation_cache", False)
        return compile_lowered(lowered, compiler_options, **options)
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def cpu_type() -> str:
    """Return an identifier of the processor and its instruction sets, as programs are specific to them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.machine(), platform.processor()]
    # Exclude clock rates, which vary.
    kept = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))} or set(lines)
    return hashlib.sha256("\n".join(sorted(kept)).encode()).hexdigest()[:12]


def pytest_configure(config):
    enable_compilation_cache(config)
    # No test may depend on a GPU; `benchmarks.gpu` checks claims about them.
    jax.config.update("jax_platforms", "cpu")


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def cpu_branches():
    """Trace the branches of CPUs alone, in a quarter less time; for files that lower for no other platform."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "platform_dependent", branch_of_cpu)
        yield
    # Functions that JAX traced here have no other branches.
    jax.clear_caches()


def branch_of_cpu(*args, default=None, **branches):
    return branches.get("cpu", default)(*args)


ABSENT = {"netns"}
"""Markers of hardware or privileges whose absence excuses a skip in continuous integration."""


def pytest_runtest_logreport(report):
    if report.skipped and not ABSENT & set(report.keywords):
        UNEXCUSED.append(report.nodeid)
    note_budget(report)


UNEXCUSED: list[str] = []


BUDGET_S = 10.0
"""CPU seconds of the setup and call of one test, including finished child processes.

Shared fixtures do not count.
"""

BEGAN_S = pytest.StashKey[float]()
SHARED_S: list[float] = []
"""CPU seconds of shared fixtures created for the current test."""

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
    # pytest-xdist workers send user properties to the reporting process.
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
    # Skip the slow garbage collection at process exit.
    gc.freeze()
    if UNEXCUSED and os.environ.get("CI"):
        print(f"\nskipped without a marker of {sorted(ABSENT)}: {UNEXCUSED}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    # CPU time of one test varies between machines and runs by up to a factor of two, and the first test of a process
    # also imports packages.
    most_s = 6 * BUDGET_S
    over = [nodeid for seconds, nodeid, thorough in OVER_BUDGET if seconds > most_s and not thorough]
    if over and os.environ.get("CI"):
        print(f"\nabove {most_s:g} CPU seconds without the marker thorough: {over}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def no_custom_calls(monkeypatch):
    """Remove the custom calls."""
    for absent in custom_calls.MODULES:
        monkeypatch.setitem(custom_calls.MODULES, absent, f"jax_moe_lb._absent_{absent}")


@pytest.fixture
def unchecked():
    """Turn off the annotation checks of the tests, which come before those of the package."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
