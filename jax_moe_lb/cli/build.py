"""`build_states` says which extension modules this installation has, and whether this jaxlib takes them."""

import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import jax

from jax_moe_lb import _custom_calls

IN_A_CHECKOUT = "in a checkout, `pip install .` where there is a C++17 compiler"
HOW_TO_BUILD = {"cpu": IN_A_CHECKOUT, "cuda": f"{IN_A_CHECKOUT} and the CUDA toolkit"}
"""It says how to get the custom calls of each platform."""


def build_states() -> dict[str, str]:
    """Says of each extension module in words whether it is there."""
    modules = {_custom_calls.MODULES[platform]: how for platform, how in HOW_TO_BUILD.items()} | {
        _custom_calls.PLANNING_MODULE: IN_A_CHECKOUT
    }
    return {module: _state(module, how) for module, how in modules.items()}


def _state(module: str, how_to_build: str) -> str:
    # A module that is missing is another fault than one that is there and cannot be loaded.
    if importlib.util.find_spec(module) is None:
        return f"missing; to get it: {how_to_build}"
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        return f"cannot be loaded: {error}"
    if module == _custom_calls.PLANNING_MODULE:
        return "built"
    state, reason = _registrations_state(loaded.registrations()), _custom_calls.why_unusable(module)
    if reason is not None:
        return f"{state}; not used: {reason}"
    return "; ".join([state, *_lacks(loaded)])


def _lacks(module: ModuleType) -> list[str]:
    # What a driver may lack, and the module then does without.
    asked = (getattr(module, name, None) for name in ("why_not_batched", "why_not_between_processes"))
    return [reason for ask in asked if ask is not None and (reason := ask()) is not None]


def _registrations_state(registrations: dict) -> str:
    built, accepted = registrations["api_version"], newest_api_version()
    state = f"built, {len(registrations['handlers'])} custom calls, XLA FFI {_dotted(built)}"
    # XLA takes handlers of its own version or older ones.
    if built > accepted:
        return f"{state}; this jaxlib takes at most {_dotted(accepted)}: build it again"
    return state


def newest_api_version() -> tuple[int, int]:
    """Reads the version of XLA's foreign function interface that the installed jaxlib has; it takes older ones too.

    Raises:
        ValueError: the headers of jaxlib do not say it.
    """
    header = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    major, minor = (re.search(rf"#define XLA_FFI_API_{part} (\d+)", header) for part in ("MAJOR", "MINOR"))
    if major is None or minor is None:
        raise ValueError("the headers of jaxlib do not say their version; expected XLA_FFI_API_MAJOR and _MINOR")
    return int(major[1]), int(minor[1])


def _dotted(number: tuple[int, int]) -> str:
    return ".".join(map(str, number))
