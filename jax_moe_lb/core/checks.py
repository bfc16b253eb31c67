"""Checks of constructor arguments by their annotations.

`@checked_fields` below `@dataclass` checks every field before `__post_init__`, which then checks relations of fields.
Without it, a wrong type fails in a later comparison or in the compiler, and the message does not name the argument. An
annotation may bound a number: `Count`, `Positive` and `NonNegative`, or `Annotated[float, Least(1.0)]`.
"""

import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np

MOST_INTEGER = 2**63 - 1
"""Largest integer of an option, such as a number of bytes."""

MOST_FLOAT = sys.float_info.max
"""Largest finite number."""

MOST_SHOWN = 60
"""Maximum length of a value in a message."""

ClassT = TypeVar("ClassT", bound=type)


@dataclass(frozen=True)
class Least:
    """Lower bound of a number in an annotation."""

    bound: float  # the bound
    excluded: bool = False  # whether numbers equal to it are refused; False by default

    def admits(self, value: Any) -> bool:
        """Return whether a number is within the bound; NaN is not."""
        return bool(value > self.bound if self.excluded else value >= self.bound)

    def __str__(self) -> str:
        return f"above {self.bound:g}" if self.excluded else f"at least {self.bound:g}"


Count = Annotated[int, Least(1.0)]
"""Integer of at least 1."""

Natural = Annotated[int, Least(0.0)]
"""Integer of at least 0."""

Positive = Annotated[float, Least(0.0, excluded=True)]
"""Finite number above 0."""

NonNegative = Annotated[float, Least(0.0)]
"""Finite number of at least 0."""


def checked_fields(cls: ClassT) -> ClassT:
    """Check the fields of a dataclass by the annotations at construction; apply it below `@dataclass`."""
    # Numbers are finite and integers fit int64. Arrays and annotations unknown at run time are not checked.
    own = getattr(cls, "__post_init__", None)

    def __post_init__(self: Any) -> None:
        kind: Any = type(self)
        hints = _hints(kind)
        last = []
        for field in fields(self):
            if not field.init:
                continue
            value = getattr(self, field.name)
            if isinstance(value, np.generic):
                # The dtype of a NumPy number would widen narrower arrays. A frozen dataclass rejects assignment.
                object.__setattr__(self, field.name, value := value.item())
            case = f"{kind.__name__}.{field.name}", value, hints.get(field.name, Any)
            if _is_infinite_number(*case[1:]):
                # The class may name the range of the number, too.
                last.append(case)
            else:
                check_value(*case)
        if own is not None:
            own(self)
        for case in last:
            check_value(*case)

    cls.__post_init__ = __post_init__  # type: ignore[attr-defined]
    return cls


def check_value(argument: str, value: object, kind: Any) -> None:
    """Check an argument by an annotation."""
    for option in _options(kind):
        for least in getattr(option, "__metadata__", ()):
            if isinstance(least, Least) and _is_number(value, Real) and not least.admits(value):
                raise ValueError(
                    f"{argument} is {shown(value)}; expected {least if _base(option) is int else expected(option)}"
                )
    if _matches(value, kind):
        return
    error = ValueError if _matches_but_for_value(value, kind) else TypeError
    raise error(f"{argument} is {shown(value)}; expected {expected(kind)}")


def accepts(function: Callable[..., Any], number: int) -> bool:
    """Return whether a function can be called with a number of positional arguments."""
    try:
        inspect.signature(function).bind(*[None] * number)
    except TypeError:
        return False
    except ValueError:
        pass  # A function compiled to C may have no signature.
    return True


def check_integer(argument: str, value: Any) -> None:
    """Check a count that fits int32."""
    check_value(argument, value, int)
    if not 1 <= value <= 2**31 - 1:
        raise ValueError(f"{argument} is {value}; expected an integer from 1 to {2**31 - 1}")


def check_array(argument: str, value: object, shape: tuple[Any, ...], kind: Any) -> None:
    """Check the shape of an array and the kind of the dtype."""
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        raise TypeError(f"{argument} is {shown(value)}; expected an array")
    sizes = shape[1:] if shape[:1] == (...,) else shape
    inner = value.shape[len(value.shape) - len(sizes) :] if sizes is not shape else value.shape
    if len(inner) != len(sizes) or any(
        isinstance(size, int) and size != found for size, found in zip(sizes, inner, strict=True)
    ):
        text = ", ".join("..." if size is ... else "any" if size is None else str(size) for size in shape)
        raise ValueError(f"{argument} has shape {value.shape}; expected [{text}]")
    if not jnp.issubdtype(value.dtype, kind):
        raise ValueError(f"{argument} has dtype {value.dtype}; expected {ARRAY_KINDS[kind]}")


ARRAY_KINDS = {jnp.integer: "integers", jnp.floating: "floating-point numbers", jnp.bool_: "booleans"}
"""Classes of dtypes in messages."""


def checked_dtype(argument: str, value: Any, allowed: tuple[Any, ...], remedy: str = "") -> np.dtype:
    """Return a dtype among some, as `np.dtype`; the error for another dtype of 8 bits has the remedy."""
    # Equal options then compare equal, as required of static arguments of `jax.jit`.
    names = [jnp.dtype(dtype).name for dtype in allowed]
    wanted = f"{', '.join(names[:-1])} or {names[-1]}"
    try:
        # NumPy reads None as float64.
        dtype = jnp.dtype(object if value is None else value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{argument} is {shown(value)}; expected {wanted}") from error
    if dtype.name not in names:
        # `jnp.dtype` turns unknown classes into "object".
        given = shown(value) if dtype.kind == "O" else dtype.name
        raise ValueError(f"{argument} is {given}; expected {wanted}{remedy if dtype.itemsize == 1 else ''}")
    return dtype


def shown(value: object) -> str:
    """Return `repr(value)` on one line, without its middle if it is long."""
    if isinstance(value, int) and abs(value) > 10**MOST_SHOWN:
        # Python refuses to print integers of thousands of digits.
        return f"an integer of {value.bit_length()} bits"
    text = " ".join(repr(value).split())
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 15]} ... {text[-10:]}"


def expected(kind: Any) -> str:
    """Return the condition of an annotation in words."""
    if _is_union(kind):
        return " or ".join(dict.fromkeys(map(expected, get_args(kind))))
    if get_origin(kind) is Annotated:
        bounds = [one for one in kind.__metadata__ if isinstance(one, Least) and kind.__origin__ is float]
        return expected(kind.__origin__) + "".join(f"{' ' if one.excluded else ', '}{one}" for one in bounds)
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"a tuple with {expected(get_args(kind)[0])} in each place"
    names = {int: "an integer", float: "a finite number", bool: "True or False", str: "a string", type(None): "None"}
    if kind in names:
        return names[kind]
    kind = get_origin(kind) or kind
    if kind is Callable:
        return "a function"
    return f"a value of {kind.__name__}" if issubclass(kind, Enum) else f"an instance of {kind.__name__}"


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except (NameError, TypeError):
        # Annotations of a user's class that exist for type checkers only.
        return {}


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(_base(kind)) if _is_union(_base(kind)) else (kind,)


def _base(kind: Any) -> Any:
    """Return an annotation without bounds."""
    return kind.__origin__ if get_origin(kind) is Annotated else kind


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def _matches(value: Any, kind: Any) -> bool:
    origin, args = get_origin(kind), get_args(kind)
    if _is_union(kind):
        return any(_matches(value, option) for option in args)
    if origin is Annotated:
        return _matches(value, kind.__origin__)
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in args)
    if origin is tuple:
        kinds = args[:1] * len(value) if isinstance(value, tuple) and args[-1] is ... else args
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_matches, value, kinds))
    if kind is float:
        # `math.isfinite` fails on an integer too large for a float; NaN fails every comparison.
        return _is_number(value, Real) and bool(abs(value) <= MOST_FLOAT)
    if kind is int:
        return _is_number(value, Integral) and abs(value) <= MOST_INTEGER
    if kind in (bool, str, type(None)):
        return isinstance(value, (bool, np.bool_) if kind is bool else kind)
    if Callable in (kind, origin):
        return callable(value)
    cls = origin or kind
    # `Any` is a class; annotations of arrays check shapes, too.
    is_known = isinstance(cls, type) and cls is not Any and not cls.__module__.startswith("jaxtyping")
    return isinstance(value, cls) if is_known else True


def _is_infinite_number(value: object, kind: Any) -> bool:
    return float in map(_base, _options(kind)) and isinstance(value, float) and not abs(value) <= MOST_FLOAT


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool | np.bool_)


def _matches_but_for_value(value: object, kind: Any) -> bool:
    """Return whether only the range of a number, or the choice among literals, is wrong."""
    for option in map(_base, _options(kind)):
        if get_origin(option) is Literal and type(value) in {type(literal) for literal in get_args(option)}:
            return True
        if (option is float and _is_number(value, Real)) or (option is int and _is_number(value, Integral)):
            return True
    return False
