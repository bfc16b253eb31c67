"""Options that a resumed run may change, and relocation of experts during a run.

A layout is the number of ranks and the system that balances their load.
"""

import json
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.experimental import multihost_utils

from jax_moe_lb import Topology, relocate
from jax_moe_lb.layer.systems import system_named
from jax_moe_lb.nn import expert_bytes
from jax_moe_lb.planners import moved_experts, plan_relocation
from models.config import ParallelConfig, TrainConfig
from models.mesh import make_system
from models.run_folder.metrics import RunFolder
from models.settings import Given, layered

OF_THE_SYSTEM = ("replica_slots", "headroom", "max_rounds")
OF_THE_RANKS = ("ranks_per_domain",)


def layout_of(parallel: ParallelConfig) -> dict[str, Any]:
    """Collect what a resumed run may change, but not without balancers beginning anew."""
    return {
        "system": parallel.system,
        "data_parallel": parallel.data_parallel,
        "expert_parallel": parallel.expert_parallel,
        # Whoever names a default asks for the same as who does not.
        "ranks_per_domain": parallel.ranks_per_domain or parallel.expert_parallel,
        "replica_slots": make_system(parallel).replica_slots,
    }


def as_before(folder: RunFolder, given: Given) -> Given:
    """Add the mesh, the system and the relocation of the run to resume to the given fields.

    Args:
        folder: that of the run to resume.
        given: fields of `TrainConfig`, which override those of the run. An option of another system, or of other
            ranks, has its default.

    Returns:
        The given fields alone if there is no run that can be read; `prepare` refuses it.
    """
    parallel_given = given.get("parallel", {})
    try:
        before = json.loads(folder.config.read_bytes())["config"]
        parallel, moves = dict(before["parallel"]), dict(before.get("relocation", {}))
    except (OSError, AttributeError, KeyError, TypeError, ValueError):
        return given
    system = parallel_given.get("system", parallel.get("system"))
    if system != parallel.get("system"):
        parallel |= dict.fromkeys(OF_THE_SYSTEM)
        if _remembers(system):
            # It knows loads by place, and experts may not move then.
            moves = {}
    if parallel_given.get("expert_parallel", parallel.get("expert_parallel")) != parallel.get("expert_parallel"):
        parallel |= dict.fromkeys(OF_THE_RANKS)
    moves = {name: value for name, value in moves.items() if value is not None}
    return layered({"parallel": parallel, "relocation": moves}, given)


def _remembers(system: str) -> bool:
    return bool(jax.tree.leaves(system_named(system).balancer.init((2, 2))))


def moved_state(state: nnx.State, permutation: Array) -> nnx.State:
    """Permute the experts of each layer in the state of `(model, optimizer)`.

    Args:
        state: the state of both.
        permutation: `[layers, E]` integers, what `next_homes` planned.
    """
    moved = relocate(state[0], state[1], permutation)
    whole: nnx.State = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(moved))
    return whole


def next_homes(state: nnx.State, config: TrainConfig, topology: Topology) -> np.ndarray:
    """Plans the permutation of each layer's places, `[layers, E]` int32, the same on all processes."""
    loads, homes = per_layer(state, "loads"), per_layer(state, "homes")
    permutation = plan_relocation(loads, topology, homes, min_gain=config.relocation.min_gain)
    # Processors may round differently, and processes must not disagree.
    return np.asarray(multihost_utils.broadcast_one_to_all(permutation))


def per_layer(state: nnx.State, name: str) -> np.ndarray:
    """Fetch a variable of every `MoE` to the host, `[layers, E]`."""
    blocks: Any = state[0]["blocks"]
    return np.stack([np.asarray(jax.device_get(blocks[i]["moe"][name].get_value())) for i in sorted(blocks)])


def described(step: int, permutation: np.ndarray, state: nnx.State, topology: Topology) -> dict:
    """Make the line of `metrics.jsonl` about a relocation: what moved after `step`, and where experts are then."""
    moved = int(moved_experts(permutation, topology).sum())
    row = {"kind": "relocation", "step": step, "experts_moved": moved}
    row["bytes_moved"] = moved * expert_bytes(state[0], state[1])
    return row | {"homes": per_layer(state, "homes").tolist()}
