"""Backends of grouped products: a table, and the choice of a backend from it.

`lax.ragged_dot` is not a backend on GPUs: XLA lowers it there to a dense product of every row with every matrix.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.backend import get_default_device
from jaxtyping import Array, Float

from jax_moe_lb.core.custom_calls import call, is_built, like, why_older_jax
from jax_moe_lb.core.device_rates import RecordedKernel, device_named, recorded_tflops
from jax_moe_lb.core.manual_axes import unvarying_call, vary_alike, vary_like
from jax_moe_lb.core.tpu_vectors import OLDEST_JAX
from jax_moe_lb.core.types import DType, GroupSizes, wide_dtype
from jax_moe_lb.kernels.blocks import matmul_by_blocks, outer_by_blocks
from jax_moe_lb.kernels.operands import RowGroups

Kind = Literal["product", "transposed", "outer"]
"""Rows times matrices, rows times transposed matrices, or outer sums, the gradients of matrices."""

KINDS: tuple[Kind, ...] = ("product", "transposed", "outer")

PLATFORMS = ("cpu", "cuda", "tpu")
"""Lowering platforms with a specific backend; all others multiply blocks of rows."""

TILE = 128
"""Multiple of widths and rows required by kernels of Mosaic on GPUs, and least width of those of Triton."""

COLUMNS, ALIGNED_ROWS = 64, 8
"""Multiples of widths and rows required by the Hopper kernels."""

SMALL_MEMORY = ("7.0", "7.2", "7.5", "8.6", "8.9", "12.0", "12.1")
"""Compute capabilities with at most 99 KB of shared memory for a thread block; the Triton kernels need 144 KB."""

HOPPER = "9.0"
"""Compute capability of H100, H200 and GH200, whose instructions the Hopper kernels use."""

NOT_INSTALLED = "not installed"

OLDEST_JAX_FOR_HOPPER = (0, 11, 2)
"""Oldest JAX by which the Hopper kernels were compiled. JAX 0.10 does not compile them, and has a Triton backend."""

_preferred: ContextVar[str | None] = ContextVar("preferred", default=None)

_Dimensions = jax.lax.RaggedDotDimensionNumbers
DIMENSIONS = {
    "product": _Dimensions((([1], [1]), ([], [])), [0], [0]),
    "transposed": _Dimensions((([1], [2]), ([], [])), [0], [0]),
    "outer": _Dimensions((([0], [0]), ([], [])), [0], []),
}


@dataclass(frozen=True)
class Product:
    """Static description of one grouped product."""

    kind: Kind  # kind of the product; see `Kind`
    num_rows: int  # `A`, number of rows
    widths: tuple[int, int]  # `I` and `O`, widths of the left operand and of the result; for "outer", of both operands
    num_groups: int | tuple[int, ...]  # `S`; for matrices or sums in several arrays, a tuple of the groups of each
    dtypes: tuple[DType, DType]  # dtypes of both operands
    dtype: DType  # dtype of the result. Products accumulate in float32 or wider.

    @property
    def parts(self) -> tuple[int, ...]:
        """Numbers of groups per array."""
        return (self.num_groups,) if isinstance(self.num_groups, int) else self.num_groups

    @property
    def all_groups(self) -> int:
        """Number of groups of all arrays."""
        return sum(self.parts)

    @property
    def is_transposed(self) -> bool:
        """Whether rows are multiplied with the transposes of the matrices."""
        return self.kind == "transposed"

    def operands(self) -> tuple[Any, Any, RowGroups]:
        """Return the shapes of the operands, with matrices in one array."""
        inner, outer = self.widths
        sizes: Any = jax.ShapeDtypeStruct((self.all_groups,), jnp.int32)
        right = {
            "product": (self.all_groups, inner, outer),
            "transposed": (self.all_groups, outer, inner),
            "outer": (self.num_rows, outer),
        }[self.kind]
        return (
            jax.ShapeDtypeStruct((self.num_rows, inner), self.dtypes[0]),
            jax.ShapeDtypeStruct(right, self.dtypes[1]),
            RowGroups(sizes),
        )


@dataclass(frozen=True)
class Backend:
    """Row of the table of backends."""

    name: str  # name printed by `jax-moe-lb doctor`
    platform: str | None  # lowering platform; `None` for every platform
    why: str  # reason to prefer it to later rows of the table
    # Function that returns the reason why it cannot compute a product, or `None`
    why_not: Callable[[Product], str | None]
    # Function for "product" and "transposed", of `(product, rows, weights, groups)`; `None` if unsupported
    matmul: Callable[..., Any] | None
    # Function for "outer", of the same arguments, and of `sums`, to which it adds; `None` if unsupported
    outer: Callable[..., Any] | None
    takes_parts: bool = False  # if True, matrices and sums may be in several arrays. False by default.
    recorded: RecordedKernel | None = None  # kernel of `recorded_rates`; `None` (default) for no record
    # If True, it is chosen only on devices with a record, or if preferred. False by default.
    needs_record: bool = False
    # If True, its products can compute the activations of a network, see `fused_ffn`. False by default.
    fuses: bool = False
    # If True, its sums read rows beyond the last group and multiply them by 0, so that these must not be NaN.
    reads_tail: bool = True

    def why_not_for(self, product: Product) -> str | None:
        """Return the reason why it cannot compute a product, or `None`."""
        has_kernel = (self.outer if product.kind == "outer" else self.matmul) is not None
        return self.why_not(product) if has_kernel else "it has no such kernel"

    def __call__(self, product: Product, left: Array, right: Any, groups: RowGroups, sums: Any) -> Any:
        """Compute the product; concatenate or split arrays if the backend requires it."""
        in_one = isinstance(product.num_groups, int) or self.takes_parts
        if product.kind != "outer":
            assert self.matmul is not None
            return self.matmul(product, left, right if in_one else jnp.concatenate(right), groups)
        assert self.outer is not None
        if in_one:
            return self.outer(product, left, right, groups, sums)
        whole = self.outer(product, left, right, groups, None)
        parts = tuple(jnp.split(whole, np.cumsum(product.num_groups)[:-1]))
        return parts if sums is None else jax.tree.map(jnp.add, sums, parts)


class BackendChoice(NamedTuple):
    """Backend of a product on one platform."""

    backend: Backend  # chosen row of the table
    reason: str  # reason for the row
    rejected: dict[str, str]  # names of earlier rows for this platform, with the reasons against them

    @property
    def why(self) -> str:
        """Reasons for the backend and against the rejected ones, on one line."""
        return "; ".join([self.reason, *(f"not {name} ({reason})" for name, reason in self.rejected.items())])


@contextmanager
def prefer_backend(name: str) -> Iterator[None]:
    """Prefer a backend for all products that it can compute, in programs traced inside the context."""
    # A program keeps the backends of its first trace, so trace a new `jax.jit` inside.
    names = [backend.name for backend in BACKENDS]
    if name not in names:
        raise ValueError(f"name is {name!r}; expected one of {', '.join(names)}")
    token = _preferred.set(name)
    try:
        yield
    finally:
        _preferred.reset(token)


def choose_backend(product: Product, platform: str) -> BackendChoice:
    """Return the backend of a product."""
    # It is the preferred backend, see `prefer_backend`. Otherwise it is the first row of `BACKENDS` that can compute
    # the product, with the recorded rows in the order of their rates; see `recorded_rates`.
    rows = [backend for backend in BACKENDS if backend.platform in (platform, None)]
    rejected: dict[str, str] = {}
    for backend in rows:
        if backend.name == _preferred.get():
            if (reason := backend.why_not_for(product)) is None:
                return BackendChoice(backend, "it is preferred", {})
            rejected[backend.name] = reason
    device = get_default_device()
    of = getattr(device, "compute_capability", ""), product.kind
    name = device_named(getattr(device, "device_kind", ""))
    rates = {one.name: rate for one in rows if (rate := recorded_tflops(*of, one.recorded, name))}
    unrecorded = [backend for backend in rows if backend.needs_record and backend.name not in rates]
    rows = [backend for backend in rows if backend not in unrecorded]
    recorded = iter(sorted((one for one in rows if one.name in rates), key=lambda one: -rates[one.name]))
    for backend in (next(recorded) if row.name in rates else row for row in rows):
        if (reason := backend.why_not_for(product)) is None:
            break
        rejected[backend.name] = reason
    for slower in rows[: rows.index(backend)]:
        rejected.setdefault(slower.name, f"recorded at {rates.get(slower.name, 0):.0f} TFLOP/s")
    for one in unrecorded:
        unknown = f"no rate is recorded on {_name(device)}"
        rejected.setdefault(one.name, one.why_not_for(product) or unknown)
    at = f", recorded at {rates[backend.name]:.0f} TFLOP/s" if backend.name in rates else ""
    return BackendChoice(backend, f"{backend.why}{at}", rejected)


def has_tokamax() -> bool:
    """Return whether tokamax is installed."""
    return importlib.util.find_spec("tokamax") is not None


def reads_parts(product: Product) -> bool:
    """Return whether the default device reads matrices, or writes sums, in several arrays without a copy."""
    is_padded, platform = min(product.widths) < TILE, accelerator()
    return platform is not None and not is_padded and choose_backend(product, platform).backend.takes_parts


def accelerator() -> Literal["cuda", "tpu"] | None:
    """Return the lowering platform of the default device; `None` if it is neither a GPU nor a TPU."""
    platforms: dict[str, Literal["cuda", "tpu"]] = {"gpu": "cuda", "tpu": "tpu"}
    return platforms.get(get_default_device().platform)


def platforms_reading_tail(products: Sequence[Product]) -> list[str]:
    """Return the platforms whose sums may read rows beyond the last group."""
    accelerators = ("cuda", "tpu")
    return [one for one in accelerators if any(choose_backend(each, one).backend.reads_tail for each in products)]


def fuses_activations(products: Iterable[Product]) -> bool:
    """Return whether the kernels of the default device can compute activations inside these products."""
    platform = accelerator()
    return platform is not None and all(
        min(product.widths) >= TILE and choose_backend(product, platform).backend.fuses for product in products
    )


def products_are_by_group() -> bool:
    """Return whether CPU windows have rows of one group each, which is faster without the custom call."""
    return not is_built("cpu")


def _name(device: Any) -> str:
    return f"{device.platform} {getattr(device, 'compute_capability', '')}".rstrip()


def _no_cpu_call(product: Product) -> str | None:
    return _misfit(product, (jnp.float32, jnp.float64, jnp.bfloat16)) if is_built("cpu") else NOT_INSTALLED


def _no_tokamax(product: Product) -> str | None:
    if not has_tokamax():
        return NOT_INSTALLED
    sizes = (product.num_rows, product.widths[0])
    if reason := _misfit(product, (jnp.bfloat16,), sizes) or _no_tiles(product):
        return reason
    try:
        # Only tracing shows whether tokamax has a kernel for the default device, which is a CPU on machines without a
        # GPU.
        jax.eval_shape(partial(_tokamax, product), *product.operands())
    except NotImplementedError:
        return f"no such kernel for the default device, {_name(get_default_device())}"
    return None


def _no_triton(product: Product) -> str | None:
    if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return "this JAX has no Triton backend"
    device = get_default_device()
    if device.platform != "gpu" or getattr(device, "compute_capability", "") in SMALL_MEMORY:
        return f"the default device is {_name(device)}; expected a GPU with 144 KB of shared memory"
    rows, (inner, outer) = product.num_rows, product.widths
    if max(rows * inner, rows * outer, max(product.parts) * inner * outer) >= 2**31:
        return "an operand has 2**31 entries or more; the kernel indexes in int32"
    return _misfit(product, (jnp.bfloat16, jnp.float16), (rows, inner, outer, *product.parts))


def _no_hopper(product: Product) -> str | None:
    if (reason := why_older_jax(OLDEST_JAX_FOR_HOPPER)) is not None:
        return reason
    device = get_default_device()
    if getattr(device, "compute_capability", "") != HOPPER:
        return f"the default device is {_name(device)}; expected compute capability {HOPPER}"
    if any(width > TILE and width % COLUMNS for width in product.widths):
        return f"widths are {product.widths[0]} and {product.widths[1]}; expected multiples of {COLUMNS}"
    if product.num_rows % ALIGNED_ROWS or product.num_rows < TILE:
        return f"{product.num_rows} rows; expected a multiple of {ALIGNED_ROWS}, at least {TILE}"
    return _misfit(product, (jnp.bfloat16, jnp.float16), (product.widths[0], product.widths[1], *product.parts))


def _no_tpu_kernel(product: Product) -> str | None:
    if (reason := why_older_jax(OLDEST_JAX)) is not None:
        return reason
    if (device := get_default_device()).platform != "tpu":
        return f"the default device is {_name(device)}; expected a TPU"
    if reason := _misfit(product, (jnp.bfloat16,), (product.num_rows, *product.widths, *product.parts)):
        return reason
    # Imported lazily: the compiler of kernels is not part of every installation.
    from jax_moe_lb.kernels import tpu_products

    return tpu_products.why_not(product)


def _misfit(product: Product, dtypes: tuple[Any, ...], sizes: tuple[int, ...] = ()) -> str | None:
    # The kernels of GPUs would compute float32 products in a lower precision.
    left, right = map(jnp.dtype, product.dtypes)
    if left != right or left not in dtypes:
        return f"operands are {left} and {right}; expected {' or '.join(jnp.dtype(dtype).name for dtype in dtypes)}"
    return "an operand is empty" if 0 in sizes else None


def _no_tiles(product: Product) -> str | None:
    if any(width % TILE for width in product.widths):
        return f"widths are {product.widths[0]} and {product.widths[1]}; expected multiples of {TILE}"
    if product.num_rows % TILE:
        return f"{product.num_rows} rows; expected a multiple of {TILE}"
    return None


def _then_add(multiply: Callable[..., Any]) -> Callable[..., Any]:
    """Add `sums` to the result of a backend without accumulation."""

    def multiply_then_add(product: Product, left: Array, right: Array, groups: RowGroups, sums: Any) -> Any:
        products = multiply(product, left, right, groups)
        if sums is not None:
            return jax.tree.map(lambda before, array: (before + array).astype(product.dtype), sums, products)
        return jax.tree.map(lambda array: array.astype(product.dtype), products)

    return multiply_then_add


def _call_matmul(product: Product, rows: Array, weights: Array, groups: RowGroups) -> Array:
    out = like(rows, (product.num_rows, product.widths[1]))
    return call("grouped_matmul", out, rows, weights, groups.sizes, transposed=int(product.is_transposed))


def _call_outer(product: Product, rows: Array, others: Array, groups: RowGroups, sums: Array | None) -> Array:
    shape, wide = (product.all_groups, *product.widths), wide_dtype(rows)
    # The call adds to its last operand in place, block by block of rows.
    operands = rows, others, groups.sizes
    before = vary_like(jnp.zeros(shape, wide), *operands) if sums is None else sums.astype(wide)
    return call("grouped_outer", like(rows, shape, wide), *operands, before, aliases={3: 0}).astype(product.dtype)


def _widened(operand: Array) -> Array:
    """Zero-pad all dimensions but the first to the least width of the kernels, such as the rank of adapters."""
    missing = [(0, 0), *((0, max(TILE - size, 0)) for size in operand.shape[1:])]
    return jnp.pad(operand, missing) if np.any(missing) else operand


def _matmul_by(module: str) -> Callable[..., Any]:
    """Return the products by the kernel of a module, which reads matrices in parts."""

    def matmul(product: Product, rows: Array, weights: Any, groups: RowGroups) -> Array:
        # Imported lazily: the compilers of kernels are not part of every installation.
        kernel = importlib.import_module(f"jax_moe_lb.kernels.{module}")

        def multiply(rows: Array, group_sizes: Array, *parts: Array) -> Array:
            operands = map(_widened, (rows, *parts))
            wide = kernel.product(*operands, group_sizes=group_sizes, transposed=product.is_transposed)
            return wide[:, : product.widths[1]]

        return unvarying_call(multiply, *vary_alike((rows, groups.sizes, *jax.tree.leaves(weights))))

    return matmul


def _outer_by(module: str) -> Callable[..., Any]:
    """Return the sums by the kernel of a module, which writes them in parts."""

    def outer(product: Product, rows: Array, others: Array, groups: RowGroups) -> Any:
        kernel = importlib.import_module(f"jax_moe_lb.kernels.{module}")

        def multiply(rows: Array, others: Array, *groups: Array) -> tuple[Array, ...]:
            operands = _widened(rows), _widened(others), RowGroups(*groups)
            wide = kernel.outer(*operands, parts=product.parts, dtype=product.dtype)
            return tuple(part[:, : product.widths[0], : product.widths[1]] for part in wide)

        sums = unvarying_call(multiply, *vary_alike((rows, others, *jax.tree.leaves(groups))))
        return sums[0] if isinstance(product.num_groups, int) else sums

    return outer


def _tokamax(product: Product, left: Array, right: Array, groups: RowGroups) -> Array:
    # Imported lazily: the package is optional.
    import tokamax

    def multiply(left: Array, right: Array, group_sizes: Array) -> Array:
        return tokamax.ragged_dot_general(
            left,
            right,
            group_sizes=group_sizes,
            ragged_dot_dimension_numbers=DIMENSIONS[product.kind],
            preferred_element_type=product.dtype,
            implementation="mosaic_gpu",
        )

    try:
        return unvarying_call(multiply, *vary_alike((left, right, groups.sizes)))
    except NotImplementedError:
        if product.kind != "transposed":
            raise
        # The kernels of some architectures cannot transpose: pass a transposed copy.
        return _tokamax(replace(product, kind="product"), left, right.mT, groups)


def _ragged(product: Product, left: Array, right: Array, groups: RowGroups) -> Array:
    # It has no batching rule for partly mapped operands.
    @jax.custom_batching.sequential_vmap
    def multiply(left: Array, right: Array, group_sizes: GroupSizes) -> Array:
        dimensions = DIMENSIONS[product.kind]
        return jax.lax.ragged_dot_general(left, right, group_sizes, dimensions, preferred_element_type=product.dtype)

    out = multiply(left, right, groups.sizes)
    # All groups are cleared: a choice of groups would save little, and lets XLA lay out temporaries worse.
    return _clear_empty(out, groups.sizes) if product.kind == "outer" else out


def _clear_empty(sums: Float[Array, "S I O"], group_sizes: GroupSizes) -> Float[Array, "S I O"]:
    # `ragged_dot_general` leaves sums of empty groups undefined. Clear these one by one, because they are few: a mask
    # would read and write all sums.
    if not group_sizes.size:
        return sums
    is_empty = (group_sizes == 0).astype(jnp.int32)
    so_far = jax.lax.cumsum(is_empty)

    def clear_one(i: Array, sums: Array) -> Array:
        group = (so_far <= i).sum(dtype=jnp.int32)
        return jax.lax.dynamic_update_index_in_dim(sums, jnp.zeros_like(sums[0]), group, 0)

    return jax.lax.fori_loop(0, so_far[-1], clear_one, sums)


def _matmul_by_blocks(product: Product, rows: Array, weights: Array, groups: RowGroups) -> Array:
    return matmul_by_blocks(rows, weights, groups.sizes, transposed=product.is_transposed)


BACKENDS = (
    Backend(
        "custom call",
        "cpu",
        why="built for cpu",
        why_not=_no_cpu_call,
        matmul=_call_matmul,
        outer=_call_outer,
    ),
    Backend(
        "tokamax.ragged_dot",
        "cuda",
        why="tokamax is installed",
        why_not=_no_tokamax,
        matmul=_tokamax,
        # On an H100 its sums differed from those by blocks of rows, and NaN in rows of no group reached them.
        outer=None,
        recorded="Mosaic",
    ),
    Backend(
        "Hopper kernel",
        "cuda",
        why="a Hopper GPU is the default device",
        why_not=_no_hopper,
        matmul=_matmul_by("mosaic_product"),
        outer=_then_add(_outer_by("mosaic_outer")),
        takes_parts=True,
        recorded="Hopper",
        # Chosen by a measured rate alone; see docs/status.md.
        needs_record=True,
        fuses=True,
    ),
    Backend(
        "Triton kernel",
        "cuda",
        why="a GPU is the default device",
        why_not=_no_triton,
        matmul=_matmul_by("triton_product"),
        outer=_then_add(_outer_by("triton_outer")),
        takes_parts=True,
        recorded="Triton",
        reads_tail=False,
    ),
    Backend(
        "Pallas kernel",
        "tpu",
        why="a TPU is the default device",
        why_not=_no_tpu_kernel,
        matmul=_matmul_by("tpu_products"),
        outer=_then_add(_outer_by("tpu_products")),
        takes_parts=True,
        fuses=True,
        reads_tail=False,
    ),
    Backend(
        "lax.ragged_dot",
        "tpu",
        why="XLA has a kernel for tpu",
        why_not=lambda _: None,
        matmul=_ragged,
        outer=_then_add(_ragged),
    ),
    Backend(
        "blocks of rows",
        None,
        why="lax.ragged_dot multiplies every row with every expert on CPUs and GPUs",
        why_not=lambda _: None,
        matmul=_matmul_by_blocks,
        outer=_then_add(lambda _, rows, others, groups: outer_by_blocks(rows, others, groups.sizes)),
        reads_tail=False,
    ),
)
"""Backends in order of preference. The last one computes every product on every platform."""
