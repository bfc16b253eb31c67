"""Plans, topologies, statistics and validation, shared by all other packages."""

from jax_moe_lb.core.custom_calls import shadowed_installation
from jax_moe_lb.core.export import prepare_export
from jax_moe_lb.core.file_limits import FileLimits
from jax_moe_lb.core.plan import Plan, imbalance, load, plain_plan, rows_between, straggler, traffic
from jax_moe_lb.core.split import Split, nearest_first
from jax_moe_lb.core.stats import Stats, needs_more_rounds, raise_on_fault, router_loss
from jax_moe_lb.core.topology import Level, Topology
from jax_moe_lb.core.validation import check_plan
from jax_moe_lb.core.virtual_devices import use_virtual_cpu_devices

__all__ = [
    "check_plan",
    "FileLimits",
    "imbalance",
    "Level",
    "load",
    "nearest_first",
    "needs_more_rounds",
    "plain_plan",
    "prepare_export",
    "Plan",
    "raise_on_fault",
    "router_loss",
    "rows_between",
    "shadowed_installation",
    "Split",
    "Stats",
    "straggler",
    "Topology",
    "traffic",
    "use_virtual_cpu_devices",
]


def __dir__() -> list[str]:
    return __all__
