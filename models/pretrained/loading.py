"""Loader of checkpoints: reads slice by slice onto a mesh, each process the shards of its devices."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jax_moe_lb import System
from jax_moe_lb.core import FileLimits
from jax_moe_lb.core.file_limits import UNLIMITED
from models.architectures.config_json import Fields, read_fields
from models.architectures.parameter_map import ParameterSlice
from models.architectures.registry import architecture_of, configured, layouts_in_file
from models.decoder.config import DecoderConfig
from models.decoder.model import Decoder
from models.mesh import placed_shapes, state_shardings
from models.pretrained.quantized import CheckpointWeights, Weights
from models.pretrained.safetensors import READ_BYTES, TensorFolder, copy_blocks, short, text_name

COMPARED_LINES = 4096  # rows of two tensors to compare at a time
SHOWN = 5  # maximum number of missing or unexpected tensors in a message


def from_pretrained(
    folder: Path,
    mesh: Mesh,
    system: System = System(),
    *,
    compute_dtype: str = "float32",
    param_dtype: str = "float32",
    predict_further: bool = False,
    limits: FileLimits = FileLimits(),
) -> Decoder:
    """Load the model of a checkpoint folder onto the devices of a mesh, for generation; training uses `load_state`."""
    # Experts are on their home ranks, other parameters on every device. A `param_dtype` as in the file preserves every
    # bit. `predict_further` loads multi-token prediction layers, too.
    dtypes = {"compute_dtype": compute_dtype, "param_dtype": param_dtype}
    config = configured(read_fields(folder, limits), **dtypes, predict_further=predict_further)

    def create() -> Decoder:
        return Decoder(config, mesh=mesh, system=system, rngs=nnx.Rngs(0))

    graph, shapes = nnx.split(nnx.eval_shape(create))
    return nnx.merge(graph, load_state(folder, config, lambda: nnx.state(create()), shapes, mesh, limits=limits))


def load_state(
    folder: Path,
    config: DecoderConfig,
    init: Callable[[], nnx.State],
    shapes: nnx.State,
    mesh: Mesh,
    *,
    stacks: Sequence[tuple[str, int]] = (),
    limits: FileLimits = FileLimits(),
) -> Any:
    """Load the parameters of a checkpoint into a state; other variables get their initial values."""
    # Each process reads its shards alone, slice by slice, and copies each slice to its devices before it reads the
    # next.
    wanted = by_path(placed_shapes(shapes, state_shardings(shapes, mesh)))
    weights, pieces = checked_weights(folder, config, limits)
    own = (piece for piece in pieces if not piece.is_copy)
    parts = grouped(piece.in_stack(stacks, config.num_layers) if stacks else piece for piece in own)
    # XLA drops the unused parameters of this program.
    others = {path: shape.sharding for path, shape in wanted.items() if _parameter(path) not in parts}

    def fresh() -> dict[str, Array]:
        return {path: leaf for path, leaf in by_path(init()).items() if path in others}

    values = jax.jit(fresh, out_shardings=others)()
    for path, shape in wanted.items():
        if path not in others:
            values[path] = placed(weights, parts[_parameter(path)], shape)
    return jax.tree.unflatten(jax.tree.structure(shapes), [values[path] for path in wanted])


def checked_weights(
    folder: Path, config: DecoderConfig, limits: FileLimits
) -> tuple[CheckpointWeights, list[ParameterSlice]]:
    """Open the files of a checkpoint, and return its tensors and the slices of the model in them."""
    tensors = TensorFolder(folder, limits, text_name if config.text_of else None)
    weights = CheckpointWeights(tensors, Fields(config.source, limits))
    return weights, checked_pieces(weights, config, layouts_in_file(config))


def _parameter(path: str) -> str:
    """Return the path in the model of a path in the state of `(model, optimizer)`, or the path itself."""
    return path.removeprefix("0.")


def by_path(state: Any) -> dict[str, Any]:
    """Return the leaves of a state by their paths in the model, such as `blocks.0.moe.up`."""
    leaves = jax.tree.leaves_with_path(state)
    named = ((jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves)
    return {path.removesuffix(".value"): leaf for path, leaf in named}


def grouped(pieces: Iterable[ParameterSlice], key: str = "path") -> dict[str, list[ParameterSlice]]:
    """Return the slices of each parameter by path, or of each tensor by name."""
    parts: dict[str, list[ParameterSlice]] = {}
    for piece in pieces:
        parts.setdefault(getattr(piece, key), []).append(piece)
    return parts


def at_home(piece: ParameterSlice, values: dict[str, Any]) -> ParameterSlice:
    """Return the slice at the row of a relocated expert, for the parameters by path."""
    homes = values.get(f"{piece.path.rpartition('.')[0]}.homes")
    return piece if homes is None or piece.expert is None else replace(piece, expert=int(homes[piece.place]))


def _passed_over(fields: Fields, num_further: int, are_tied: bool) -> tuple[str, ...]:
    """Return name prefixes of tensors to skip: multi-token prediction layers, and a copy of the tied embedding."""
    last = fields.num_layers()
    layers = tuple(f"model.layers.{layer}." for layer in range(last + num_further, last + fields.num_further()))
    layers += architecture_of(fields).names.passed_over
    return (*layers, "lm_head.weight") if are_tied else layers


def checked_pieces(
    weights: Weights, config: DecoderConfig, layouts: list[list[ParameterSlice]]
) -> list[ParameterSlice]:
    """Return the slices of a model in the one of two layouts with the tensors' names, or else their shapes."""
    first, last = layouts
    own = {piece.name for piece in last} - {piece.name for piece in first}
    has_own = not own.isdisjoint(weights.shapes)
    fits = all(weights.shapes.get(piece.name) == piece.shape for piece in first)
    pieces = last if has_own or not (own or fits) else first
    fields = Fields(config.source, UNLIMITED)
    _check(weights, pieces, _passed_over(fields, config.num_further, config.tie_embeddings))
    return pieces


def _check(weights: Weights, pieces: list[ParameterSlice], passed_over: tuple[str, ...]) -> None:
    """Check that exactly the tensors of the model are there, before any is read."""
    names = {name for name in weights.shapes if not name.startswith(passed_over)}
    shapes = {piece.name: piece.shape for piece in pieces if not piece.is_copy or piece.name in names}
    for what, differing in (("missing", shapes.keys() - names), ("not of this model", names - shapes.keys())):
        if differing:
            shown = ", ".join(map(short, sorted(differing)[:SHOWN]))
            more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
            raise ValueError(f"{weights.place}: {what}: {shown}{more}; expected the tensors of config.json's sizes")
    for name, shape in shapes.items():
        weights.check(name, shape)
    for copy in (piece for piece in pieces if piece.is_copy and piece.name in names):
        _check_copy(weights, copy, next(piece.name for piece in pieces if piece.path == copy.path))


def _check_copy(weights: Weights, copy: ParameterSlice, name: str) -> None:
    """Check that a copy equals the original tensor, as the model shares one parameter for both."""
    for start in range(0, copy.shape[0], COMPARED_LINES):
        lines = (slice(start, min(start + COMPARED_LINES, copy.shape[0])),)
        if not np.array_equal(weights.read(copy.name, lines), weights.read(name, lines)):
            raise ValueError(f"{weights.place}: {copy.name} is not {name}; expected a copy, as it is shared")


def placed(weights: Weights, pieces: list[ParameterSlice], shape: Any) -> Array:
    """Read the shards of a parameter onto the devices of this process."""
    ranges = {
        device: tuple(range(size)[part] for size, part in zip(shape.shape, index or (), strict=True))
        for device, index in shape.sharding.addressable_devices_indices_map(shape.shape).items()
    }
    # Small shards are assembled on the host, as each update of a device's buffer is a program to compile.
    is_small = math.prod(shape.sharding.shard_shape(shape.shape)) * shape.dtype.itemsize * len(ranges) <= READ_BYTES
    shards: dict[Any, Any] = {}
    if is_small:
        shards = {device: np.zeros(tuple(map(len, parts)), shape.dtype) for device, parts in ranges.items()}
    for piece in pieces:
        _place(weights, piece, ranges, shards, shape.dtype)
    arrays = [jax.device_put(shards[device], device) for device in ranges]
    return jax.make_array_from_single_device_arrays(shape.shape, shape.sharding, arrays)


def _place(
    weights: Weights, piece: ParameterSlice, ranges: dict[Any, tuple[range, ...]], shards: Any, dtype: Any
) -> None:
    """Read a slice and write it into the shards of its devices, with two copies of it in host memory at most."""
    depth = len(piece.place)
    homes = [d for d in ranges if all(at in part for at, part in zip(piece.place, ranges[d], strict=False))]
    if not homes:
        # Skip experts whose home is in another process.
        return
    # The smallest ranges that contain those of all devices.
    extents = zip(*(ranges[device][depth:] for device in homes), strict=True)
    box = [range(min(part.start for part in parts), max(part.stop for part in parts)) for parts in extents]
    value = _read(weights, piece, box, dtype)
    for device in homes:
        where = zip(ranges[device][depth:], box, strict=True)
        part = value[tuple(slice(r.start - b.start, r.stop - b.start) for r, b in where)]
        local = tuple(part.index(at) for at, part in zip(piece.place, ranges[device], strict=False))
        if isinstance(shards.get(device), np.ndarray):
            shards[device][local] = part
            continue
        line = jax.device_put(part, device)
        if depth and device not in shards:
            # The argument `device` of `jnp.zeros` fills an array on the default device first, and copies it.
            with jax.default_device(device):
                shards[device] = jnp.zeros(tuple(map(len, ranges[device])), dtype)
        shards[device] = _with_line(shards[device], line, local) if depth else line
        # Wait for the transfer; otherwise the host would read ahead and hold all pending slices in memory.
        shards[device].block_until_ready()


@partial(jax.jit, donate_argnums=0)
def _with_line(buffer: Array, line: Array, at: tuple[int, ...]) -> Array:
    start = (*at, *[0] * line.ndim)
    return jax.lax.dynamic_update_slice(buffer, line.reshape((1,) * len(at) + line.shape), start)


def _read(weights: Weights, piece: ParameterSlice, box: list[range], dtype: Any) -> np.ndarray:
    """Read a part of a slice, given by ranges of the dimensions of the parameter."""
    if piece.transposed:
        box = [*box[:-2], box[-1], box[-2]]
    given, index = list(piece.index) + [slice(None)] * (len(piece.shape) - len(piece.index)), []
    left = iter(box)
    for size, part in zip(piece.shape, given, strict=True):
        if isinstance(part, slice):
            lines = range(size)[part]
            kept = next(left)
            part = slice(lines.start + kept.start * lines.step, lines.start + kept.stop * lines.step, lines.step)
        index.append(part)
    value = weights.read(piece.name, tuple(index))
    if not piece.transposed:
        return value.astype(dtype, copy=False)
    value = np.swapaxes(value, -1, -2)
    found = np.empty(value.shape, dtype)
    copy_blocks(value, found)
    return found
