"""Shapes, as XLA writes them: `bf16[16,2048]{1,0:T(8,128)S(1)}`, or several of them in parentheses."""

import math
import re
from dataclasses import dataclass

BITS = {
    "pred": 8,
    **{f"{kind}{bits}": bits for kind in "su" for bits in (1, 2, 4, 8, 16, 32, 64)},
    "bf16": 16,
    "f16": 16,
    "f32": 32,
    "f64": 64,
    "c64": 64,
    "c128": 128,
}
"""The bits of an element; `f8e4m3fn` and the like say theirs in the name, and tokens and opaque values have none."""

ARRAY = re.compile(r"\b(pred|bf16|[suc]\d+|f\d+\w*)\[([\d,<=]*)\](\{[^}]*\})?")
MEMORY_SPACE = re.compile(r"S\((\d+)\)")


@dataclass(frozen=True)
class ArrayShape:
    """This is the shape of one array.

    Args:
        dtype: as XLA writes it, such as `bf16`.
        dims: the sizes of its dimensions.
        space: the memory that holds it: 0 is the device's own, 1 on a TPU the fast memory of a core.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def nbytes(self) -> int:
        """Counts the bytes of all elements, without padding."""
        return -(-math.prod(self.dims) * _bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def parse_shapes(text: str) -> tuple[ArrayShape, ...]:
    """Reads the arrays out of a shape, those of a tuple in order.

    Args:
        text: a shape as XLA writes it; what is no array, such as a token, is left out.
    """
    return tuple(_array(*match.groups()) for match in ARRAY.finditer(text))


def _array(dtype: str, dims: str, layout: str | None) -> ArrayShape:
    space = MEMORY_SPACE.search(layout or "")
    # A dimension of unknown length is written with its bound, `<=8`.
    sizes = tuple(int(size.removeprefix("<=")) for size in dims.split(",") if size)
    return ArrayShape(dtype, sizes, int(space[1]) if space else 0)


def _bits(dtype: str) -> int:
    if dtype in BITS:
        return BITS[dtype]
    named = re.match(r"f(\d+)e", dtype)
    return int(named[1]) if named else 0
