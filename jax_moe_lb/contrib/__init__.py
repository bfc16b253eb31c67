"""Balancers of others, for comparisons, and a budget of replica slots over layers; one file per source."""

from jax_moe_lb.contrib.craft import slots_by_layer
from jax_moe_lb.contrib.echo import ECHO
from jax_moe_lb.contrib.epic import EPIC
from jax_moe_lb.contrib.llep import LLEP
from jax_moe_lb.contrib.lplb import LPLB
from jax_moe_lb.contrib.moonep import MoonEP

__all__ = ["ECHO", "EPIC", "LLEP", "LPLB", "MoonEP", "slots_by_layer"]


def __dir__() -> list[str]:
    return __all__
