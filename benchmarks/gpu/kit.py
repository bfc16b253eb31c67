"""Programs that are compiled ahead for an absent GPU, or in threads on a machine with one.

A stored program is a compressed pickle of `jax.experimental.serialize_executable`, in a folder of its GPU, of the
version of JAX and of this library's sources. A program that is absent, or that does not load, is compiled.
"""

import hashlib
import os
import pickle
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.stages import Compiled, Lowered, Wrapped

from benchmarks.gpu.device import gpu_kind
from benchmarks.gpu.once import LOAD, marked
from jax_moe_lb.core import custom_calls

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "gpu-kit" / "programs"
UNUSABLE = FOLDER.with_name("programs-that-do-not-load")
"""Name of the folder after a failed first load, so that no later check loads programs."""

COMPILED = FOLDER.with_name("compiled")
"""Folder of compiled programs by the text before compilation, which changes of other code leave; not to be copied."""

PROGRAMS = ("comparison", "kit", "one_rank", "products", "tiles")
SOURCES = ("jax_moe_lb/**/*.py", "jax_moe_lb/**/*.toml", *(f"benchmarks/gpu/{name}.py" for name in PROGRAMS))
"""Files that decide a program: kernels are chosen by the rates of the device."""


class AheadProgram(Protocol):
    """Program that can be compiled for an absent device."""

    def lower(self, device: jax.Device | None) -> Lowered:
        """Trace the program for an absent device, or for the default one if `None`."""

    def options(self, device: jax.Device | None) -> dict[str, Any]:
        """Return the compiler options."""


def lowered(function: Wrapped, arguments: Sequence[Any], device: jax.Device | None) -> Lowered:
    """Trace a function for an absent device, or for the default one if `None`."""
    if device is None:
        return function.lower(*arguments)
    with jax.default_device(device):
        return function.trace(*arguments).lower(lowering_platforms=("cuda",))


class Program(NamedTuple):
    """Function and the shapes of its arguments."""

    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]

    def lower(self, device: jax.Device | None) -> Lowered:
        """Trace the function for an absent device, or for the default one if `None`."""
        sharding = None if device is None else jax.sharding.SingleDeviceSharding(device)
        arguments = jax.tree.map(
            lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=sharding), self.arguments
        )
        return lowered(jax.jit(self.function), arguments, device)

    def options(self, device: jax.Device | None) -> dict[str, Any]:
        del device
        return {}


Programs = dict[tuple[Any, ...], Program]


@cache
def fingerprint() -> str:
    """Return a hash of the sources and the version of JAX: other programs do not load, or have other values."""
    found = hashlib.sha256(jax.__version__.encode())
    for path in sorted(path for source in SOURCES for path in ROOT.glob(source)):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def path_of(name: str, kind: str | None = None) -> Path:
    """Return the file of a program for a GPU, by default the one of this process."""
    readable = re.sub(r"[^\w]+", "-", name)[:80]
    number = hashlib.sha256(name.encode()).hexdigest()[:10]
    return FOLDER / f"{kind or gpu_kind() or 'cpu'}-{fingerprint()}" / f"{readable}-{number}.bin"


def store(name: str, compiled: Compiled, kind: str | None = None) -> int:
    """Write a program, and return the bytes of its file."""
    path = path_of(name, kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process may read it.
    partial_path = path.with_suffix(f".{os.getpid()}")
    partial_path.write_bytes(zlib.compress(pickle.dumps(serialize(compiled)), 9))
    partial_path.replace(path)
    return path.stat().st_size


def load(name: str) -> Compiled | None:
    """Return a stored program on the first device; `None` if there is none, or if it does not load."""
    path = path_of(name)
    if not path.exists():
        return None
    try:
        # Tracing registers custom calls, too, but a loaded program is not traced.
        custom_calls.register()
        with marked(f"{LOAD} {path.name}"):
            # Only files of this folder are read; `make gpu-kit` writes them.
            stored = pickle.loads(zlib.decompress(path.read_bytes()))
            return deserialize_and_load(*stored, execution_devices=jax.devices()[:1])
    except Exception as error:  # it is compiled instead
        print(f"{name} does not load: {in_words(error)}", file=sys.stderr, flush=True)
        return None


def in_words(error: Exception, length: int = 200) -> str:
    """Return the type and message of an exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:length]


def compiled_or_loaded(name: str, program: AheadProgram) -> Compiled:
    """Load a program, or compile it for the default device."""
    return load(name) or program.lower(None).compile(program.options(None))


def name_of(key: tuple[Any, ...]) -> str:
    """Return the name of a program in a file, equal in all processes."""
    return ", ".join(str(part) for part in key)


def compile_all(given: Mapping[tuple[Any, ...], AheadProgram]) -> dict[Any, Any]:
    """Load or compile programs in threads; the result of one that fails is its exception."""

    def attempt(key: tuple[Any, ...]) -> Any:
        try:
            return compiled_or_loaded(name_of(key), given[key])
        except Exception as error:  # other programs are measured without it
            return error

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(given, pool.map(attempt, given), strict=True))


def compiled_one(compiled: Mapping[tuple[Any, ...], Any], key: tuple[Any, ...]) -> Compiled:
    """Return a program of `compile_all`, or raise its exception."""
    if isinstance(found := compiled[key], Exception):
        raise found
    return found


def build(
    programs: Mapping[str, AheadProgram], kind: str | None, device: jax.Device | None, threads: int
) -> dict[str, str]:
    """Compile and store the programs that are not stored yet, and return the outcome of each."""

    def one(name: str) -> str:
        try:
            if path_of(name, kind).exists():
                return "stored before"
            program = programs[name]
            # Tracing holds Python's lock; only XLA runs beside it.
            traced, options = program.lower(device), program.options(device)
            same = COMPILED / _digest(kind, traced, options)
            if kind is None or not same.exists():
                nbytes = store(name, traced.compile(options), kind)
                if kind is not None:
                    COMPILED.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path_of(name, kind), same)
                return f"{nbytes / 1e6:.2f} MB"
            path_of(name, kind).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(same, path_of(name, kind))
            return "compiled before"
        except Exception as error:  # the machine compiles it
            return f"failed: {in_words(error)}"

    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(programs, pool.map(one, programs), strict=True))


def _digest(kind: str | None, traced: Lowered, options: Mapping[str, Any]) -> str:
    text = "\n".join([jax.__version__, str(kind), str(sorted(options.items())), traced.as_text()])
    return hashlib.sha256(text.encode()).hexdigest()


def remove_others(kind: str) -> None:
    """Remove the stored programs of a GPU for other sources."""
    for path in FOLDER.glob(f"{kind}-*"):
        if path.name != f"{kind}-{fingerprint()}":
            shutil.rmtree(path)


def disable() -> None:
    """Rename the folder, so that later processes compile all programs."""
    if FOLDER.exists():
        FOLDER.rename(UNUSABLE.with_name(f"{UNUSABLE.name}-{os.getpid()}"))
