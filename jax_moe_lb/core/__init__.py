"""Plans, topologies, statistics and validation, shared by all other packages."""

from lazy_loader import attach_stub

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

# Imported at first use: a layer needs few of them.
__getattr__, __dir__, _ = attach_stub(__name__, __file__)
