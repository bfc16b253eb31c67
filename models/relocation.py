"""Relocation moves experts to other ranks every so many steps of a run, by the loads of the steps before."""

from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.experimental import multihost_utils

from jax_moe_lb import Topology, moved_experts, plan_relocation
from jax_moe_lb.nn import expert_bytes, relocate
from models.presets import TrainConfig


def moved_state(state: nnx.State, permutation: Array) -> nnx.State:
    """Permutes the experts of each layer in the state of `(model, optimizer)`.

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
    permutation = plan_relocation(loads, topology, homes, min_gain=config.relocate_min_gain)
    # Processors may round differently, and processes must not disagree.
    return np.asarray(multihost_utils.broadcast_one_to_all(permutation))


def per_layer(state: nnx.State, name: str) -> np.ndarray:
    """Fetches a variable of every `MoE` to the host, `[layers, E]`."""
    blocks: Any = state[0]["blocks"]
    return np.stack([np.asarray(jax.device_get(blocks[i]["moe"][name].get_value())) for i in sorted(blocks)])


def described(step: int, permutation: np.ndarray, state: nnx.State, topology: Topology) -> dict:
    """Makes the line of `metrics.jsonl` about a relocation: what moved after `step`, and where experts are then."""
    moved = int(moved_experts(permutation, topology).sum())
    row = {"kind": "relocation", "step": step, "experts_moved": moved}
    row["bytes_moved"] = moved * expert_bytes(state[0], state[1])
    return row | {"homes": per_layer(state, "homes").tolist()}
