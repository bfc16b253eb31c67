"""Update of a loaded model from tensors in memory, such as the state dict of a trainer."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.architectures.parameter_map import Index
from models.architectures.registry import pieces_of
from models.decoder.model import Decoder
from models.decoder.stacked import StackedDecoder
from models.pretrained.loading import at_home, by_path, checked_pieces, grouped, placed


class HeldTensors:
    """Tensors in host memory."""

    def __init__(self, tensors: Mapping[str, np.ndarray]) -> None:
        self.tensors, self.place = tensors, "tensors"
        self.shapes = {name: tuple(value.shape) for name, value in tensors.items()}

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise `ValueError` unless a tensor has the given shape and a dtype of floats without scales."""
        if self.shapes[name] != shape:
            raise ValueError(f"tensors: {name} has shape {list(self.shapes[name])}; expected {list(shape)}")
        dtype = self.tensors[name].dtype
        # Floats of 8 bits and fewer are stored with scales, which these layouts do not have.
        if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize == 1:
            raise ValueError(f"tensors: {name} has dtype {dtype}; expected floats of at least 16 bits")

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """Return a tensor, or a part of it."""
        return self.tensors[name][index]


def update_weights(model: Decoder | StackedDecoder, tensors: Mapping[str, np.ndarray]) -> None:
    """Replace the parameters of a model, which keep their dtypes and shardings; compiled programs stay valid."""
    # All processes call this function with the same tensors. Relocated experts stay where they are.
    if isinstance(model, StackedDecoder) and model.adapter_scale:
        raise ValueError("model has adapters; expected a model without")
    weights, state = HeldTensors(tensors), nnx.state(model)
    layouts = [pieces_of(model.config), pieces_of(model.config, packed=True)]
    pieces, values = checked_pieces(weights, model.config, layouts), by_path(state)
    if isinstance(model, StackedDecoder):
        pieces = [piece.in_stack(model.places, model.config.num_layers) for piece in pieces]
    for path, parts in grouped(at_home(piece, values) for piece in pieces if not piece.is_copy).items():
        old = values[path]
        values[path] = placed(weights, parts, jax.ShapeDtypeStruct(old.shape, old.dtype, sharding=old.sharding))
    nnx.update(model, jax.tree.unflatten(jax.tree.structure(state), values.values()))
