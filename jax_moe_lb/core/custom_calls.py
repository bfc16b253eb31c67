"""The custom calls: which were built, how they are registered, and how a program chooses them.

A build has `_ffi` (CPU) and, where a CUDA compiler was at hand, `_ffi_cuda`. Both hold the same names, so that one
traced program lowers on either. Without them every operation still works, in plain JAX.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

MODULES = {"cpu": "jax_moe_lb._ffi", "cuda": "jax_moe_lb._ffi_cuda"}
"""The extension module that holds the custom calls of each platform."""

PLANNING_MODULE = "jax_moe_lb._planning"
"""The extension module that holds the planners as functions of NumPy arrays."""


def is_built(platform: str) -> bool:
    """Says whether this installation holds the custom calls of a platform of `MODULES`, and they can run here."""
    module = MODULES[platform]
    return importlib.util.find_spec(module) is not None and why_unusable(module) is None


@functools.cache
def why_unusable(module: str) -> str | None:
    """Says why the custom calls of an extension module that is there cannot run on this machine; `None` if they can.

    Those of CUDA need a driver that knows the runtime that they were built with. Where there is no driver they are used
    all the same: such a machine compiles for others.

    Args:
        module: one of `MODULES`.
    """
    try:
        ask = getattr(importlib.import_module(module), "why_unusable", None)
    except ImportError:
        return None  # `register` and `jax-moe-lb doctor` say it
    return None if ask is None else ask()


def shadowed_installation() -> Path | None:
    """Finds the folder of an installation with custom calls that Python passes by for this one, which has none.

    That is so in a checkout, from which `pip install .` installs and which `python -m` finds first; there run from
    another folder, or install with `pip install -e .`. All works without custom calls too, but slower.

    Returns:
        The folder of that installation; `None`, which is usual, where nothing is passed by.

    Examples:
        >>> from jax_moe_lb.core import shadowed_installation
        >>> shadowed_installation() is None
        True
    """
    if importlib.util.find_spec(MODULES["cpu"]) is not None:
        return None
    here = Path(__file__).parent
    # Several may be on the path: a checkout has one as soon as anything was built in it.
    for installed in importlib.metadata.distributions(name="jax_moe_lb"):
        for file in installed.files or ():
            where = Path(str(installed.locate_file(file)))
            if where.name.startswith("_ffi.") and where.suffix == ".so" and where.exists() and where.parent != here:
                return where.parent
    return None


def has_planning_module() -> bool:
    """Says whether this installation can plan on NumPy arrays, without a JAX program."""
    return importlib.util.find_spec(PLANNING_MODULE) is not None


def by_platform(
    *args: Any, native: Callable, reference: Callable | None, platforms: tuple[str, ...] = tuple(MODULES)
) -> Any:
    """Calls `native(*args)` where a program is lowered for a platform that was built, else `reference(*args)`.

    Use it for every operation that has a custom call: the choice is made when a program is lowered, so one traced
    program serves all platforms, and a machine without a GPU can lower for one.

    Args:
        *args: arrays, the operands of both forms.
        native: makes the custom call.
        reference: the same in plain JAX. Without it, `None`, the program cannot be lowered for other platforms, and at
            least one must have been built.
        platforms: names of `MODULES` on which the custom call exists; all of them by default.
    """
    built = {platform: native for platform in platforms if is_built(platform)}
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
    """Makes the custom call `moe_lb_<name>`.

    Args:
        name: the name of the call without the prefix.
        out: shapes and dtypes of the results; see `like`.
        args: the operands.
        aliases: operand to result, by number: the result is written over the operand.
        attributes: static values; integers become int64, `np.float32` and the like keep their type.
    """
    register()
    # No side effect: `jax.checkpoint` refuses them, and every result is used.
    bound = jax.ffi.ffi_call(
        f"moe_lb_{name}", out, vmap_method="sequential", input_output_aliases=aliases, has_side_effect=False
    )
    return bound(*args, **attributes)


def like(array: jax.Array, shape: tuple[int, ...] | None = None, dtype: Any = None) -> Any:
    """Describes a result that varies over the mesh axes of `array` and is placed like it.

    Use it for the results of `call`, which inside `jax.shard_map` would otherwise vary over no axis.

    Args:
        array: an operand.
        shape: of the result; that of `array` by default.
        dtype: of the result; that of `array` by default.
    """
    aval = jax.typeof(array)
    shape = aval.shape if shape is None else shape
    # A placement names one entry per dimension; another number of them is placed nowhere in particular.
    sharding = aval.sharding if len(shape) == aval.ndim else aval.sharding.update(spec=(None,) * len(shape))
    return aval.update(shape=shape, dtype=aval.dtype if dtype is None else dtype, weak_type=False, sharding=sharding)


@functools.cache
def register() -> None:
    """Makes the custom calls known to JAX, once; `call` does it before the first of them."""
    # The CPU client must exist first: it flushes queued handlers before the types that they need.
    jax.devices()
    for platform, module in MODULES.items():
        if is_built(platform):
            _register_platform(platform, importlib.import_module(module).registrations())


def _register_platform(platform: str, registrations: dict) -> None:
    name = "CUDA" if platform == "cuda" else platform
    for type_name, registration in registrations["types"].items():
        jax.ffi.register_ffi_type(type_name, registration, platform=name)
    for target, stages in registrations["handlers"].items():
        jax.ffi.register_ffi_target(target, stages, platform=name)
