"""Packages of the extra `[tools]`, which layers do not need."""

from importlib.util import find_spec

TOOLS = ("pydantic", "scipy", "typer", "yaml")
"""Modules of the extra that flax does not install, too."""


def missing_of_tools() -> str | None:
    """Return the message for the first missing module; `None` if all are installed."""
    missing = next((module for module in TOOLS if find_spec(module) is None), None)
    return missing and f"{missing} is not installed; run pip install 'jax_moe_lb[tools]'"


def require_tools() -> None:
    """Raise `ModuleNotFoundError` with the installation command if a module is missing."""
    if missing := missing_of_tools():
        raise ModuleNotFoundError(missing)
