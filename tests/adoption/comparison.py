"""Comparison of a balanced model of another library with the unchanged one."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import keystr

TOLERANCE = 1e-5
"""Largest difference over the largest value of each array; both sum in float32, in another order."""

SYSTEMS = ["exact", "plain", "greedy"]


def randomize(model):
    """Set each matrix to random values of unit gain, as some libraries begin with zeros or very small values."""
    for number, (_, variable) in enumerate(nnx.iter_graph(model)):
        if isinstance(variable, nnx.Param) and variable.get_value().ndim >= 2:
            shape, dtype = variable.get_value().shape, variable.get_value().dtype
            noise = jax.random.normal(jax.random.key(number), shape, dtype)
            variable.set_value(noise / jnp.sqrt(jnp.asarray(shape[-2], dtype)))
    return model


def outcome(model, call, *arrays):
    """Return outputs of `call(model, *arrays)` and the gradients of all parameters and of float arrays."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    indices = [0, *(i for i, array in enumerate(arrays, 1) if jnp.issubdtype(array.dtype, jnp.floating))]

    def loss(params, *arrays):
        outputs = call(nnx.merge(graph, params, rest, copy=True), *arrays)
        return sum(jnp.square(leaf).mean() for leaf in jax.tree.leaves(outputs)), outputs

    gradients, outputs = jax.jit(jax.grad(loss, argnums=indices, has_aux=True))(params, *arrays)
    return {"outputs": outputs, "gradients": [nnx.to_pure_dict(gradients[0]), *gradients[1:]]}


def differences(found, expected):
    """Return the largest difference of each array, over its largest value."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    largest = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max().clip(1e-30)), found, expected)
    return {keystr(path): value for path, value in jax.tree.leaves_with_path(largest)}


def assert_equal(found, expected, title):
    every = differences(found, expected)
    worst = max(every, key=every.get)
    print(f"\n{title}: {len(every)} arrays, largest difference {every[worst]:.0e} ({worst})")
    assert every[worst] < TOLERANCE


def paths(model):
    """Return path and identity of each parameter."""
    return {path: id(variable) for path, variable in nnx.iter_graph(model) if isinstance(variable, nnx.Param)}
