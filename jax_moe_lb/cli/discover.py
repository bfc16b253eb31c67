"""A balancer is found by the name of its file in `jax_moe_lb/balancers/`, so a new file needs no entry anywhere."""

import importlib
import inspect
import pkgutil

from jax_moe_lb import balancers
from jax_moe_lb.balancers.base import Balancer


def load_balancer(name: str) -> Balancer:
    """Makes the balancer of a file, with its default hyper-parameters.

    Args:
        name: the name of the file, without `.py`: `greedy`, `eplb_plus` and so on.

    Raises:
        ValueError: there is no such balancer; the message lists those that there are.
    """
    found = _balancer_class(name) if name in _file_names() else None
    if found is None:
        raise ValueError(f"--balancer is {name!r}; expected one of {', '.join(balancer_names())}")
    return found()


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
    # The command line has no way to give a balancer its arguments.
    parameters = inspect.signature(value).parameters.values()
    return all(parameter.default is not inspect.Parameter.empty for parameter in parameters)
