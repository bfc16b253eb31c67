"""Loader of checkpoints: reads tensor by tensor onto a mesh, each expert to its home rank."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jax_moe_lb import System
from jax_moe_lb.core import FileLimits
from models.architectures.config_json import Fields, read_fields
from models.architectures.parameter_map import ParameterSlice
from models.architectures.registry import configured, pieces_of
from models.decoder.model import Decoder
from models.mesh import state_shardings
from models.pretrained.quantized import CheckpointWeights
from models.pretrained.safetensors import TensorFolder, short

COMPARED_LINES = 4096
"""Rows of two tensors to compare at a time."""

SHOWN = 5
"""Maximum number of missing or unexpected tensors in a message."""


def from_pretrained(
    folder: Path,
    mesh: Mesh,
    system: System = System(),
    *,
    compute_dtype: str = "float32",
    param_dtype: str = "float32",
    scan_layers: bool = False,
    predict_further: bool = False,
    limits: FileLimits = FileLimits(),
) -> Decoder:
    """Load the model of a checkpoint onto the devices of a mesh.

    Host memory holds one tensor at a time, or one expert's part of it. Each tensor is copied to devices as it is read:
    experts to their home ranks, other tensors to every device.

    Args:
        folder: folder with `config.json` and safetensors, as written by `transformers`.
        mesh: return value of `models.mesh.make_mesh`.
        system: load-balancing system.
        compute_dtype: dtype of activations and matrix products (default "float32"); use "bfloat16" on accelerators.
        param_dtype: dtype of parameters (default "float32"); the dtype of the file preserves every bit.
        scan_layers: if True, run layers of equal structure as one `jax.lax.scan`, for training.
        predict_further: if True, also load multi-token prediction layers (DeepSeek-V3 and GLM-4.5), for
            `Decoder.ahead`.
        limits: limits of `config.json`, of the index and of the headers.

    Returns:
        The model.

    Raises:
        ValueError: the architecture is not supported or has no multi-token prediction layers; tensors are missing,
            unexpected, of a wrong shape or not floats; or a file is damaged.
    """
    fields = read_fields(folder, limits)
    options: dict[str, Any] = {"compute_dtype": compute_dtype, "param_dtype": param_dtype}
    config = configured(fields, scan_layers=scan_layers, predict_further=predict_further, **options)
    with TensorFolder(folder, limits) as tensors:
        weights, pieces = CheckpointWeights(tensors, fields), pieces_of(config)
        _check(weights, pieces, _passed_over(fields, config.num_further, config.tie_embeddings))
        parts = _grouped(piece for piece in pieces if not piece.is_copy)

        def create() -> Decoder:
            return Decoder(config, mesh=mesh, system=system, rngs=nnx.Rngs(0))

        graph, shapes = nnx.split(nnx.eval_shape(create))
        # State absent from checkpoints: balancer states and windows. XLA drops the unused parameters of this program.
        everywhere = NamedSharding(mesh, PartitionSpec())
        fresh = by_path(jax.jit(lambda: nnx.state(create(), nnx.Not(nnx.Param)), out_shardings=everywhere)())
        where, leaves = by_path(state_shardings(shapes, mesh)), []
        for path, shape in by_path(shapes).items():
            leaves.append(_placed(weights, parts[path], shape, where[path]) if path in parts else fresh[path])
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(shapes), leaves))


def by_path(state: Any) -> dict[str, Any]:
    """Return the leaves of a state by their paths in the model, such as `blocks.0.moe.up`."""
    leaves = jax.tree.leaves_with_path(state)
    named = ((jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves)
    return {path.removesuffix(".value"): leaf for path, leaf in named}


def _grouped(pieces: Iterable[ParameterSlice]) -> dict[str, list[ParameterSlice]]:
    parts: dict[str, list[ParameterSlice]] = {}
    for piece in pieces:
        parts.setdefault(piece.path, []).append(piece)
    return parts


def _passed_over(fields: Fields, num_further: int, are_tied: bool) -> tuple[str, ...]:
    """Return name prefixes of tensors to skip: multi-token prediction layers, and a copy of the tied embedding."""
    last = fields.num_layers()
    layers = tuple(f"model.layers.{layer}." for layer in range(last + num_further, last + fields.num_further()))
    return (*layers, "lm_head.weight") if are_tied else layers


def _check(weights: CheckpointWeights, pieces: list[ParameterSlice], passed_over: tuple[str, ...]) -> None:
    """Check that a checkpoint has exactly the tensors of the model, before any is read."""
    names = {name for name in weights.shapes if not name.startswith(passed_over)}
    shapes = {piece.name: piece.shape for piece in pieces if not piece.is_copy or piece.name in names}
    for what, differing in (("missing", shapes.keys() - names), ("not of this model", names - shapes.keys())):
        if differing:
            shown = ", ".join(map(short, sorted(differing)[:SHOWN]))
            more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
            folder = weights.tensors.folder
            raise ValueError(f"{folder}: {what}: {shown}{more}; expected the tensors of config.json's sizes")
    for name, shape in shapes.items():
        weights.check(name, shape)
    for copy in (piece for piece in pieces if piece.is_copy and piece.name in names):
        _check_copy(weights, copy, next(piece.name for piece in pieces if piece.path == copy.path))


def _check_copy(weights: CheckpointWeights, copy: ParameterSlice, name: str) -> None:
    """Check that a copy equals the original tensor, as the model shares one parameter for both."""
    for start in range(0, copy.shape[0], COMPARED_LINES):
        lines = (slice(start, min(start + COMPARED_LINES, copy.shape[0])),)
        if not np.array_equal(weights.read(copy.name, lines), weights.read(name, lines)):
            raise ValueError(f"{weights.tensors.folder}: {copy.name} is not {name}; expected a copy, as it is shared")


def _placed(weights: CheckpointWeights, pieces: list[ParameterSlice], shape: Any, sharding: Sharding) -> Array:
    """Read a parameter and place the shard of each device."""
    where = {device: index or () for device, index in sharding.addressable_devices_indices_map(shape.shape).items()}
    if pieces[0].expert is None:
        value = _read(weights, pieces[0], shape.dtype)
        parts = [jax.device_put(value[index], device) for device, index in where.items()]
        return jax.make_array_from_single_device_arrays(shape.shape, sharding, parts)
    ranges = {device: range(shape.shape[0])[index[0]] for device, index in where.items()}
    buffers = {
        device: jnp.zeros((len(ranges[device]), *_sizes(shape.shape[1:], index[1:])), shape.dtype, device=device)
        for device, index in where.items()
    }
    for piece in pieces:
        assert piece.expert is not None
        homes = [device for device in where if piece.expert in ranges[device]]
        if not homes:
            # Skip experts whose home is in another process.
            continue
        value = _read(weights, piece, shape.dtype)
        for device in homes:
            line = jax.device_put(value[where[device][1:]], device)
            buffers[device] = _with_line(buffers[device], line, ranges[device].index(piece.expert))
            # Wait for the transfer; otherwise the host would read ahead and hold all pending tensors in memory.
            buffers[device].block_until_ready()
    return jax.make_array_from_single_device_arrays(shape.shape, sharding, list(buffers.values()))


def _sizes(shape: tuple[int, ...], index: tuple[slice, ...]) -> list[int]:
    return [len(range(size)[part]) for size, part in zip(shape, index, strict=True)]


@partial(jax.jit, donate_argnums=0)
def _with_line(buffer: Array, line: Array, at: int) -> Array:
    return jax.lax.dynamic_update_index_in_dim(buffer, line, at, 0)


def _read(weights: CheckpointWeights, piece: ParameterSlice, dtype: Any) -> np.ndarray:
    value = weights.read(piece.name, piece.index)
    value = np.swapaxes(value, -1, -2) if piece.transposed else value
    return np.ascontiguousarray(value.astype(dtype, copy=False))
