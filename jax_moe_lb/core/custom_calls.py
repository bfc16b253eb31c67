"""Registration and selection of the XLA custom calls.

A build contains `_ffi` (CPU) and, if a CUDA compiler was found, `_ffi_cuda`. Both define the same call names, so one
traced program lowers for either platform. Without these modules, every operation runs in plain JAX.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.experimental.pallas.tpu  # an import in a trace would add to the context of traces: a second compilation
import jaxlib

from jax_moe_lb.core.types import DType

MODULES = {"cpu": "jax_moe_lb._ffi", "cuda": "jax_moe_lb._ffi_cuda"}
"""Extension module with the custom calls per platform."""

PLANNING_MODULE = "jax_moe_lb._planning"
"""Extension module with the planners as functions of NumPy arrays."""


def is_built(platform: str) -> bool:
    """Return whether this installation has usable custom calls for a platform."""
    module = MODULES[platform]
    return importlib.util.find_spec(module) is not None and why_unusable(module) is None


@functools.cache
def why_unusable(module: str) -> str | None:
    """Return the reason why an installed extension module cannot run here; `None` if it can."""
    # CUDA modules need a driver supporting their CUDA runtime. Without any driver the module counts as usable, because
    # such a machine compiles for other machines.
    try:
        ask = getattr(importlib.import_module(module), "why_unusable", None)
    except ImportError:
        return None  # reported by `register` and `jax-moe-lb doctor`
    return None if ask is None else ask()


def why_refused(built: tuple[int, int]) -> str | None:
    """Return the reason why jaxlib refuses custom calls built for a version of the interface, or `None`."""
    # XLA accepts handlers of its own version and older ones.
    accepted = newest_api_version()
    if built <= accepted:
        return None
    return (
        f"jaxlib {jaxlib.__version__} accepts at most {'.'.join(map(str, accepted))}; run pip install . in a checkout"
    )


def newest_api_version() -> tuple[int, int]:
    """Return the version of XLA's foreign function interface in the installed jaxlib, which accepts older ones too."""
    header = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    major, minor = (re.search(rf"#define XLA_FFI_API_{part} (\d+)", header) for part in ("MAJOR", "MINOR"))
    if major is None or minor is None:
        raise ValueError("the headers of jaxlib have no version; expected XLA_FFI_API_MAJOR and _MINOR")
    return int(major[1]), int(minor[1])


def why_older_jax(oldest: tuple[int, ...]) -> str | None:
    """Return the reason why this JAX is older than a version, or `None`."""
    if jax.__version_info__ >= oldest:
        return None
    return f"JAX is {jax.__version__}; expected at least {'.'.join(map(str, oldest))}"


def shadowed_installation() -> Path | None:
    """Return the folder of an installation with custom calls hidden by this package without any.

    This happens in a checkout after `pip install .`, because `python -m` imports the package from the current folder
    first. Run from another folder, or install with `pip install -e .`. Without custom calls all operations work, but
    more slowly.

    Returns:
        Folder of the hidden installation; `None` (usual) if no installation is hidden.

    Examples:
        >>> from jax_moe_lb.core import shadowed_installation
        >>> shadowed_installation() is None
        True
    """
    if importlib.util.find_spec(MODULES["cpu"]) is not None:
        return None
    here = Path(__file__).parent
    # The path can hold several distributions: a checkout is one after its first build.
    for installed in importlib.metadata.distributions(name="jax_moe_lb"):
        for file in installed.files or ():
            where = Path(str(installed.locate_file(file)))
            if where.name.startswith("_ffi.") and where.suffix == ".so" and where.exists() and where.parent != here:
                return where.parent
    return None


def has_planning_module() -> bool:
    """Return whether the native planners for NumPy arrays are installed."""
    return importlib.util.find_spec(PLANNING_MODULE) is not None


def by_platform(
    *args: Any,
    native: Callable,
    reference: Callable | None,
    platforms: tuple[str, ...] = tuple(MODULES),
    cuda: Callable | None = None,
) -> Any:
    """Call `native(*args)` on platforms with custom calls, and `reference(*args)` on all others."""
    # Use it for every operation with a custom call. The choice is made at lowering, so one traced program serves all
    # platforms, and a machine without a GPU can lower for one.
    built = {platform: native for platform in platforms if is_built(platform)}
    if cuda is not None and "cuda" in built:
        built["cuda"] = cuda
    if reference is not None and not built:
        _warn_of_pure_jax()
    return jax.lax.platform_dependent(*args, **built, default=reference)


def is_pure_jax() -> bool:
    """Return whether this installation has no extension module, so that every operation runs in plain JAX."""
    modules = (*MODULES.values(), PLANNING_MODULE)
    return all(importlib.util.find_spec(module) is None for module in modules)


@functools.cache
def _warn_of_pure_jax() -> None:
    # TPUs have no custom calls, so a pure installation loses nothing there.
    if is_pure_jax() and jax.default_backend() != "tpu":
        message = "jax_moe_lb was installed without extension modules and runs in plain JAX; run jax-moe-lb doctor"
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def call(name: str, out: Any, *args: jax.Array, aliases: dict[int, int] | None = None, **attributes: Any) -> Any:
    """Make the custom call `moe_lb_<name>`."""
    register()
    # Declare no side effect: `jax.checkpoint` rejects effects. All results are used, so XLA keeps the call.
    bound = jax.ffi.ffi_call(
        f"moe_lb_{name}", out, vmap_method="sequential", input_output_aliases=aliases, has_side_effect=False
    )
    return bound(*args, **attributes)


def like(array: jax.Array, shape: tuple[int, ...] | None = None, dtype: DType | None = None) -> Any:
    """Return the type of a result with the varying mesh axes and sharding of `array`."""
    # Use it for the results of `call`: inside `jax.shard_map` they would otherwise vary over no axis.
    aval = jax.typeof(array)
    shape = aval.shape if shape is None else shape
    # A sharding has one entry per dimension; a result with another number of them is unsharded.
    sharding = aval.sharding if len(shape) == aval.ndim else aval.sharding.update(spec=(None,) * len(shape))
    return aval.update(shape=shape, dtype=aval.dtype if dtype is None else dtype, weak_type=False, sharding=sharding)


@functools.cache
def register() -> None:
    """Register the custom calls with JAX, once per process; `call` does so before its first use."""
    # Create the CPU client first: it flushes queued handlers before the types needed by them.
    jax.devices()
    for platform, module in MODULES.items():
        if is_built(platform):
            _register_platform(platform, importlib.import_module(module).registrations())


def _register_platform(platform: str, registrations: dict) -> None:
    # XLA would fail at the first program, with another message.
    if (refused := why_refused(registrations["api_version"])) is not None:
        built = ".".join(map(str, registrations["api_version"]))
        raise ImportError(f"{MODULES[platform]} was built for XLA FFI {built}; {refused}")
    name = "CUDA" if platform == "cuda" else platform
    for type_name, registration in registrations["types"].items():
        jax.ffi.register_ffi_type(type_name, registration, platform=name)
    for target, stages in registrations["handlers"].items():
        jax.ffi.register_ffi_target(target, stages, platform=name)
