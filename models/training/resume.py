"""Options that a resumed run may change, and relocation of experts during a run.

A layout is the number of ranks and the system balancing their load.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.experimental import multihost_utils

from jax_moe_lb import Topology, relocate
from jax_moe_lb.core.checks import shown
from jax_moe_lb.core.file_limits import LimitError
from jax_moe_lb.layer.systems import system_named
from jax_moe_lb.nn import expert_bytes
from jax_moe_lb.planners import moved_experts, plan_relocation
from models.config import BatchConfig, DataConfig, LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from models.mesh import make_system
from models.run_folder.checkpoints import steps_in
from models.run_folder.files import misplacement
from models.run_folder.metrics import RunFolder
from models.settings import Given, layered

OF_THE_SYSTEM = ("replica_slots", "headroom", "max_rounds")
OF_THE_RANKS = ("ranks_per_domain",)
OF_THE_STAGES = ("repeats", "microbatches", "layers_before")


def layout_of(parallel: ParallelConfig) -> dict[str, Any]:
    """Return the layout: options that a resumed run may change if its balancers start anew."""
    stages = {"stages": parallel.stages} if parallel.stages > 1 else {}
    return stages | {
        "system": parallel.system,
        "data_parallel": parallel.data_parallel,
        "expert_parallel": parallel.expert_parallel,
        # An explicit default equals an omitted option.
        "ranks_per_domain": parallel.ranks_per_domain or parallel.expert_parallel,
        "replica_slots": make_system(parallel).replica_slots,
    }


def as_before(folder: RunFolder, given: Given) -> Given:
    """Add the mesh, system, relocation and time of the run to resume to the given fields."""
    parallel_given = given.get("parallel", {})
    try:
        before = folder.described()["config"]
        parallel, moves = dict(before["parallel"]), dict(before.get("relocation", {}))
        data = {"now": now} if (now := before.get("data", {}).get("now")) else {}
    except (OSError, AttributeError, KeyError, TypeError, ValueError):
        return given
    system = parallel_given.get("system", parallel.get("system"))
    if system != parallel.get("system"):
        parallel |= dict.fromkeys(OF_THE_SYSTEM)
        if jax.tree.leaves(system_named(system).balancer.init((2, 2))):
            # Its balancer keeps loads by place, which is incompatible with relocation.
            moves = {}
    if parallel_given.get("expert_parallel", parallel.get("expert_parallel")) != parallel.get("expert_parallel"):
        parallel |= dict.fromkeys(OF_THE_RANKS)
    if parallel_given.get("stages", parallel.get("stages")) != parallel.get("stages"):
        parallel = {name: value for name, value in parallel.items() if name not in OF_THE_STAGES}
    moves = {name: value for name, value in moves.items() if value is not None}
    return layered({"parallel": parallel, "relocation": moves, "data": data}, given)


def moved_state(state: nnx.State, permutation: Array) -> nnx.State:
    """Permute the experts of each layer in the state of `(model, optimizer)`."""
    leaves, structure = jax.tree.flatten(state)
    axes = [0 if _is_stacked(path) else None for path, _ in jax.tree.leaves_with_path(state)]

    def moved(leaves: list[Array], permutation: Array) -> list[Array]:
        of_layer: nnx.State = jax.tree.unflatten(structure, leaves)
        return jax.tree.leaves(relocate(of_layer[0], of_layer[1], permutation))

    whole: nnx.State = jax.tree.unflatten(
        structure, jax.vmap(moved, in_axes=(axes, 0), out_axes=axes)(leaves, permutation[:, None])
    )
    return whole


def _is_stacked(path: Any) -> bool:
    """Return whether the leaf at a path, of a model or its optimizer, has all layers in its first dimension."""
    return any(jax.tree_util.keystr((key,), simple=True) == "stacks" for key in path)


def next_homes(state: nnx.State, config: TrainConfig, topology: Topology) -> np.ndarray:
    """Plan the permutation of each layer's places, `[layers, E]` int32, the same on all processes."""
    loads, homes = per_layer(state, "loads"), per_layer(state, "homes")
    permutation = plan_relocation(loads, topology, homes, min_gain=config.relocation.min_gain)
    # Broadcast the plan, as rounding may differ between processors.
    return np.asarray(multihost_utils.broadcast_one_to_all(permutation))


def per_layer(state: nnx.State, name: str) -> np.ndarray:
    """Return a variable of every `MoE` on the host, `[layers, E]`."""
    stacks: Any = state[0]["stacks"]
    return np.asarray(jax.device_get(stacks[0][0]["moe"][name].get_value()))


def described(step: int, permutation: np.ndarray, state: nnx.State, topology: Topology) -> dict:
    """Return the row of `metrics.jsonl` for a relocation after `step`: moved experts and their new homes."""
    moved = int(moved_experts(permutation, topology).sum())
    row = {"kind": "relocation", "step": step, "experts_moved": moved}
    shapes = jax.tree.map_with_path(
        lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape[int(_is_stacked(path)) :], leaf.dtype), state
    )
    row["bytes_moved"] = moved * expert_bytes(shapes[0], shapes[1])
    return row | {"homes": per_layer(state, "homes").tolist()}


def check_continues(now: dict[str, Any], steps: int, folder: RunFolder) -> None:
    """Raise `ValueError` unless the run in the folder can be resumed."""
    done = steps_in(folder.checkpoints)
    if not done or not folder.config.exists():
        raise ValueError(f"resume is set, but {str(folder.path)!r} has no checkpoint; expected a run_dir with one")
    try:
        before = _fixed(folder.described())
    except LimitError:
        raise
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"{str(folder.config)!r} cannot be read; expected the config of the run to resume") from error
    for name, value in _fixed(now).items():
        if value != before.get(name):
            raise ValueError(f"{name} is {value!r}; expected {shown(before.get(name))}, as in the run to resume")
    # A folder with another name than its step is no checkpoint to resume.
    run_id, limits = folder.run_id, folder.limits
    newest = next((step for step in done if not misplacement(folder.checkpoints / str(step), run_id, limits)), 0)
    if newest > steps:
        raise ValueError(f"steps is {steps}; expected at least {newest}, the step of the checkpoint to resume")
    # Raises if a row cannot be parsed.
    folder.rows("step")


def _fixed(described: dict) -> dict:
    """Return the options that a resumed run may not change."""
    # A key missing from an older run has its default.
    config = {"lora": {}, "data": {}} | described["config"]
    whole = {"model": ModelConfig, "batch": BatchConfig, "lora": LoraConfig}
    sections = {name: dataclasses.asdict(kind(**config[name])) for name, kind in whole.items()}
    fixed = {f"{name}.{key}": value for name, values in sections.items() for key, value in values.items()}
    # The residuals of a step do not change its result.
    del fixed["model.remat"]
    optimizer, data = OptimizerConfig(**config["optimizer"]), DataConfig(**config["data"])
    fixed |= {"optimizer.name": optimizer.name, "optimizer.state_dtype": optimizer.state_dtype}
    fixed |= {"data.within_documents": data.within_documents, "seed": config["seed"]}
    return fixed | {"data": described["data"]["fingerprint"]}
