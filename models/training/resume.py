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
from jax_moe_lb.layer.system import OPTIONS
from jax_moe_lb.layer.systems import system_named
from jax_moe_lb.nn import expert_bytes
from jax_moe_lb.planners import moved_experts, plan_relocation
from models.config import ParallelConfig, TrainConfig
from models.mesh import make_system
from models.run_folder.checkpoints import steps_in
from models.run_folder.files import misplacement
from models.run_folder.metrics import RunFolder
from models.settings import Given, layered, read_mapping, updated

BASE_FINGERPRINT = "base_fingerprint"  # key of `config.json`, in runs with adapters of a checkpoint


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
    if not _can_resume(folder):
        # `check_continues` raises after the other options are checked.
        return given
    before, of_given = _before(folder)[0], given.get("parallel", {})
    parallel, moves = dataclasses.asdict(before.parallel), dataclasses.asdict(before.relocation)
    changed = {name for name, value in parallel.items() if of_given.get(name, value) != value}
    if "system" in changed:
        parallel |= dict.fromkeys(OPTIONS)
        if jax.tree.leaves(system_named(of_given["system"]).balancer.init((2, 2))):
            # Its balancer keeps loads by place, which is incompatible with relocation.
            moves = {}
    if "expert_parallel" in changed:
        parallel["ranks_per_domain"] = None
    if "stages" in changed:
        parallel |= {"repeats": 1, "microbatches": None, "layers_before": 0}
    moves = {name: value for name, value in moves.items() if value is not None}
    if given.get("relocation", {}).get("interval", 0) is None:
        # The other options of relocation go with it.
        moves = {}
    data = {"now": now} if (now := before.data.now) else {}
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


def check_continues(config: TrainConfig, fingerprint: str, folder: RunFolder, base_fingerprint: str = "") -> None:
    """Raise `ValueError` unless the run in the folder can be resumed."""
    if not _can_resume(folder):
        raise ValueError(f"resume is set, but {str(folder.path)!r} has no checkpoint; expected a run_dir with one")
    before = _fixed(*_before(folder))
    for name, value in _fixed(config, fingerprint).items():
        if value != before[name]:
            raise ValueError(f"{name} is {value!r}; expected {shown(before[name])}, as in the run to resume")
    # Folders of older runs have no fingerprint of the base.
    if base_fingerprint and folder.described().get(BASE_FINGERPRINT, base_fingerprint) != base_fingerprint:
        raise ValueError(f"model.checkpoint is {config.model.checkpoint!r}; expected the tensors of the run to resume")
    # A folder with another name than its step is no checkpoint to resume.
    run_id, limits = folder.run_id, folder.limits
    done = steps_in(folder.checkpoints)
    newest = next((step for step in done if not misplacement(folder.checkpoints / str(step), run_id, limits)), 0)
    if newest > config.steps:
        raise ValueError(f"steps is {config.steps}; expected at least {newest}, the step of the checkpoint to resume")
    # Raises if a row cannot be parsed.
    folder.rows("step")


def _can_resume(folder: RunFolder) -> bool:
    return bool(steps_in(folder.checkpoints)) and folder.config.exists()


def _before(folder: RunFolder) -> tuple[TrainConfig, str]:
    """Return the configuration of the run to resume, in which missing keys have their defaults, and its data."""
    try:
        described = folder.described()
        return updated(TrainConfig(), read_mapping(TrainConfig, described["config"])), described["data"]["fingerprint"]
    except LimitError:
        raise
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"{str(folder.config)!r} cannot be read; expected the config of the run to resume") from error


def _fixed(config: TrainConfig, fingerprint: str) -> dict[str, Any]:
    """Return the options that a resumed run may not change."""
    whole = {name: dataclasses.asdict(getattr(config, name)) for name in ("model", "batch", "lora")}
    fixed = {f"{name}.{key}": value for name, values in whole.items() for key, value in values.items()}
    # The residuals of a step do not change its result.
    del fixed["model.remat"]
    fixed |= {f"optimizer.{key}": getattr(config.optimizer, key) for key in ("name", "state_dtype")}
    within = config.data.within_documents
    return fixed | {"data.within_documents": within, "seed": config.seed, "data": fingerprint}
