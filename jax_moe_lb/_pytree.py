"""`pytree` makes frozen dataclasses pytrees."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, TypeVar, dataclass_transform

import jax

Value = TypeVar("Value")


@dataclass_transform(frozen_default=True)
def pytree(cls: type[Value]) -> type[Value]:
    """Makes `cls` a frozen dataclass and a pytree; a field with metadata `static` is part of the tree's structure.

    Unlike `jax.tree_util.register_dataclass` it does not call `__init__` to rebuild a value: transformations put
    placeholders where arrays stand, and checks of shapes and types belong to the code that builds one.
    """
    made: Any = dataclass(frozen=True)(cls)
    static = [field.name for field in fields(made) if field.metadata.get("static")]
    dynamic = [field.name for field in fields(made) if field.name not in static]

    def flatten_with_keys(value: Any) -> tuple[list, tuple]:
        children = [(jax.tree_util.GetAttrKey(name), getattr(value, name)) for name in dynamic]
        return children, tuple(getattr(value, name) for name in static)

    def flatten(value: Any) -> tuple[list, tuple]:
        return [getattr(value, name) for name in dynamic], tuple(getattr(value, name) for name in static)

    def unflatten(aux: tuple, children: Iterable) -> Any:
        value: Any = object.__new__(made)
        for name, child in (*zip(dynamic, children, strict=True), *zip(static, aux, strict=True)):
            # A frozen dataclass refuses ordinary assignment.
            object.__setattr__(value, name, child)
        return value

    jax.tree_util.register_pytree_with_keys(made, flatten_with_keys, unflatten, flatten)
    return made
