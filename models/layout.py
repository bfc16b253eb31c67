"""A layout is what a resumed run may change: the ranks, and the system that balances their load."""

import json
from typing import Any

import jax

from jax_moe_lb.systems import system_named
from models.parallel import make_system
from models.presets import ParallelConfig
from models.recording import RunFolder

OF_THE_SYSTEM = ("replica_slots", "headroom", "max_rounds")
OF_THE_RANKS = ("ranks_per_domain",)
MOVES = ("relocate_interval", "relocate_min_gain")


def layout_of(parallel: ParallelConfig) -> dict[str, Any]:
    """Collects what a resumed run may change, but not without balancers beginning anew."""
    return {
        "system": parallel.system,
        "data_parallel": parallel.data_parallel,
        "expert_parallel": parallel.expert_parallel,
        # Whoever names a default asks for the same as who does not.
        "ranks_per_domain": parallel.ranks_per_domain or parallel.expert_parallel,
        "replica_slots": make_system(parallel).replica_slots,
    }


def as_before(folder: RunFolder, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Finds how the run to resume was laid out, as far as the command line does not say otherwise.

    Args:
        folder: that of the run to resume.
        given: options of `ParallelConfig`, `None` where nothing is given. An option of another system, or of other
            ranks, has its default.

    Returns:
        Options of `ParallelConfig`, and those of relocation of `TrainConfig`; none where there is no run that can be
        read, which whoever resumes it refuses.
    """
    try:
        before = json.loads(folder.config.read_bytes())["config"]
        parallel, moves = dict(before["parallel"]), {name: before.get(name) for name in MOVES}
    except (OSError, AttributeError, KeyError, TypeError, ValueError):
        return {}, {}
    if given["system"] not in (None, parallel.get("system")):
        parallel |= dict.fromkeys(OF_THE_SYSTEM)
        if _remembers(given["system"]):
            # It knows loads by place, and experts may not move then.
            moves = {}
    if given["expert_parallel"] not in (None, parallel.get("expert_parallel")):
        parallel |= dict.fromkeys(OF_THE_RANKS)
    return parallel | named(given), moves


def _remembers(system: str) -> bool:
    return bool(jax.tree.leaves(system_named(system).balancer.init((2, 2))))


def named(options: dict[str, Any]) -> dict[str, Any]:
    """Leaves out the options that were not given; `None` is such a one, and 0 is not."""
    return {name: value for name, value in options.items() if value is not None}
