"""Parameters are made where they belong on the mesh."""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jax_moe_lb.types import DType

LogicalAxes = tuple[str | None, ...]

LogicalAxisRules = tuple[tuple[str, tuple[str, ...] | str | None], ...]


@dataclass(frozen=True)
class Parameters:
    """Makes the parameters of a layer.

    Args:
        mesh: where they live.
        rules: the table from logical to mesh axes.
        dtype: theirs.
        kernel_init: the initializer of all kernels.
        rngs: random numbers for them.
    """

    mesh: Mesh
    rules: LogicalAxisRules
    dtype: DType
    kernel_init: nnx.Initializer
    rngs: nnx.Rngs

    def kernel(self, shape: tuple[int, ...], axes: LogicalAxes) -> nnx.Param:
        """Makes one kernel, of two dimensions, or a stack of them.

        Args:
            shape: its shape.
            axes: the logical axis of each dimension, `None` for one that is not split.
        """
        # Initializers take the leading axis of a stack of kernels for a batch: give single ones such an axis.
        batched = (1, *shape) if len(shape) == 2 else shape
        value = self.kernel_init(self.rngs.params(), batched, self.dtype)
        return nnx.Param(value.reshape(shape), out_sharding=axes, mesh=self.mesh, sharding_rules=self.rules)

    def bias(self, shape: tuple[int, ...], axes: LogicalAxes) -> nnx.Param:
        """Makes a bias, or a stack of them, which are 0.

        Args:
            shape: its shape.
            axes: the logical axis of each dimension.
        """
        value = jnp.zeros(shape, self.dtype)
        return nnx.Param(value, out_sharding=axes, mesh=self.mesh, sharding_rules=self.rules)
