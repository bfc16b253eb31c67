"""A balancer is found by the name of its file in `jax_moe_lb/balancers/`, so a new file needs no entry anywhere."""

import ast
import importlib
import inspect
import pkgutil
from typing import Any

from jax_moe_lb import balancers
from jax_moe_lb.balancers.base import Balancer, Chain
from jax_moe_lb.balancers.exact import Exact
from jax_moe_lb.sim.limits import shown

WORDS = {"true": True, "false": False, "none": None}


def load_balancer(text: str) -> Balancer:
    """Makes what the option `--balancer` names.

    Args:
        text: `NAME`, the name of a file without `.py`, such as `greedy`; with options `NAME:key=value,key=value`; or
            several joined by `+`, of which each edits the plan of the one before, as in `ultraep+rails`.

    Raises:
        ValueError: there is no such balancer or option, or a value is out of range; the message says what there is.

    Examples:
        >>> load_balancer("exact:eps=0.05,localize=false").eps
        0.05
    """
    parts = tuple(_one(part) for part in text.split("+"))
    if any(isinstance(part, Exact) for part in parts[1:]):
        raise ValueError(
            f"--balancer is {shown(text)}; expected exact first, as it drops the replicas of others; "
            f"simulate --system takes hybridep+exact"
        )
    return parts[0] if len(parts) == 1 else Chain(parts)


def _one(text: str) -> Balancer:
    name, _, options = text.partition(":")
    found = _balancer_class(name) if name in _file_names() else None
    if found is None:
        raise ValueError(f"--balancer is {shown(name)}; expected one of {', '.join(balancer_names())}")
    return found(**dict(_option(found, name, pair) for pair in options.split(",") if options))


def _option(kind: type[Balancer], name: str, pair: str) -> tuple[str, Any]:
    key, _, text = pair.partition("=")
    known = inspect.signature(kind).parameters
    if key not in known:
        raise ValueError(f"--balancer {name} has no option {shown(key)}; expected one of {', '.join(known)}")
    try:
        value = WORDS[text] if text in WORDS else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    wanted = known[key].default
    # What may be left out has no default to compare with, and then it is a number.
    kinds = (
        (int, float, type(None)) if wanted is None else (int, float) if isinstance(wanted, float) else (type(wanted),)
    )
    if type(value) not in kinds:
        raise ValueError(f"--balancer {name}:{key} is {shown(text)}; expected a value like {wanted!r}, the default")
    return key, float(value) if isinstance(wanted, float) and isinstance(value, int) else value


def balancer_names() -> list[str]:
    """Lists every name that `load_balancer` knows."""
    return [name for name in _file_names() if _balancer_class(name) is not None]


def _file_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(balancers.__path__))


def _balancer_class(file_name: str) -> type[Balancer] | None:
    """Finds the concrete balancer called like its file (`eplb_plus`: `EPLBPlus`) that needs no arguments."""
    module = importlib.import_module(f"{balancers.__name__}.{file_name}")
    for name, value in vars(module).items():
        # Class names keep the papers' capitals, so only their lower case can be compared.
        if name.lower() == file_name.replace("_", "") and _is_usable(value):
            return value
    return None


def _is_usable(value: object) -> bool:
    if not (isinstance(value, type) and issubclass(value, Balancer)) or inspect.isabstract(value):
        return False
    parameters = inspect.signature(value).parameters.values()
    return all(parameter.default is not inspect.Parameter.empty for parameter in parameters)
