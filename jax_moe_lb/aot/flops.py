"""Floating-point operations of a program's products, two per multiply-add, and the forms of these products.

The operations of kernels in custom calls follow from the shapes of the operands. A grouped kernel counts every row of
its buffer once, regardless of the group and of whether a token fills it.
"""

import itertools
import json
import math
import re
from dataclasses import dataclass, replace

import numpy as np

from jax_moe_lb.aot.execution_counts import OperationCost, executed
from jax_moe_lb.aot.hlo import ArrayShape, Computation, Instruction, Module

GEMM_TARGETS = re.compile(r"__cublas\$|__cudnn\$|__triton|triton|mosaic|pallas|tpu_custom_call|xla\.gpu")
"""Custom calls that may contain products."""

SCORES = re.compile(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]')
"""Shape of the attention scores over all pairs of tokens, which cuDNN never writes."""

SIZES = re.compile(r"\bgrouped_\w+?_(\d+)x(\d+)x(\d+)\b")
"""Sizes of the product in the name of a kernel of this package for Hopper or TPUs."""

TILING = re.compile(r'ragged_dot_tiling="(\d+),(\d+),(\d+)"')
"""Tile of XLA's grouped products on TPUs: rows and widths of both operands."""

DIM_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
WINDOW_FIELD = re.compile(r"(\w+)=([\dx_\-]+)")


def products(module: Module) -> list[OperationCost]:
    """List the operations with matrix products, each with the floating-point operations of one execution."""
    return executed(module, lambda computation, one: flops_of(module, computation, one))


def flops_of(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Count the floating-point operations of one execution of an instruction."""
    opcode = instruction.opcode
    if opcode in ("fusion", "async-start"):
        return sum(flops_of(module, called, one) for called in module.called(instruction) for one in called)
    operands = computation.operands(instruction)
    if opcode == "dot":
        return _dot(instruction, operands[0].shapes[0], instruction.numbers("lhs_contracting_dims"))
    if opcode == "ragged-dot":
        return _ragged_dot(instruction, operands)
    if opcode == "convolution":
        return _convolution(instruction, operands)
    if opcode == "custom-call" and GEMM_TARGETS.search(instruction.target):
        return _kernel(instruction, operands)
    return 0


def _dot(instruction: Instruction, lhs: ArrayShape, contracting: tuple[int, ...]) -> int:
    return 2 * math.prod(instruction.shapes[0].dims) * math.prod(lhs.dims[axis] for axis in contracting)


def _ragged_dot(instruction: Instruction, operands: list[Instruction]) -> int:
    """Count a grouped product: every row is multiplied with the weights of its own group only."""
    lhs, contracting = operands[0].shapes[0], instruction.numbers("lhs_contracting_dims")
    if set(instruction.numbers("lhs_ragged_dims")) <= set(contracting):
        # The contraction is over rows: each row is in one group, and the result has all groups.
        width = math.prod(instruction.shapes[0].dims[1:])
        return 2 * width * math.prod(lhs.dims[axis] for axis in contracting)
    return _dot(instruction, lhs, contracting)


def _kernel(instruction: Instruction, operands: list[Instruction]) -> int:
    given = [shape for operand in operands for shape in operand.shapes]
    if "cudnn$fmha" in instruction.target:
        return _attention(instruction, given[0].dims[-1])
    if "lhs_contracting_dimensions" in instruction.attributes:
        config = re.search(r'"lhs_contracting_dimensions":(\[[^\]]*\])', instruction.attributes)
        return _dot(instruction, given[0], tuple(map(int, json.loads(config[1])))) if config else 0
    if sizes := SIZES.search(instruction.text("op_name")):
        return 2 * math.prod(map(int, sizes.groups()))
    return _grouped_kernel([*given, *instruction.shapes])


def _attention(instruction: Instruction, head_width: int) -> int:
    """Count cuDNN's attention: two products over all pairs of tokens forward, five backward; half of it if causal."""
    scores = SCORES.search(instruction.attributes)
    pairs = math.prod(int(size) for size in re.findall(r"\d+", scores[1])) if scores else 0
    products = 5 if "Backward" in instruction.target else 2
    return 2 * products * pairs * head_width // (2 if "CAUSAL" in instruction.attributes else 1)


def _grouped_kernel(shapes: tuple[ArrayShape, ...] | list[ArrayShape]) -> int:
    """Count a grouped product from all of the arrays: rows `[A, m]` and `[A, n]` and weights `[S, m, n]`."""
    # The result may be any of them, depending on whether this is the forward pass or a gradient; the work is the same.
    weights = max((shape for shape in shapes if len(shape.dims) == 3), key=lambda one: one.nbytes, default=None)
    flat = [shape.dims for shape in shapes if len(shape.dims) == 2]
    if weights is None:
        return 0
    inner, outer = weights.dims[1:]
    pairs = itertools.permutations(flat, 2)
    rows = (_shared(one, inner, other, outer) for one, other in pairs)
    return 2 * max(rows, default=0) * inner * outer


def _shared(one: tuple[int, ...], width: int, other: tuple[int, ...], other_width: int) -> int:
    """Count the rows shared by two matrices of these widths, for either orientation of each."""
    rows = {one[1 - axis] for axis in (0, 1) if one[axis] == width}
    other_rows = {other[1 - axis] for axis in (0, 1) if other[axis] == other_width}
    return max(rows & other_rows, default=0)


def _convolution(instruction: Instruction, operands: list[Instruction]) -> int:
    """Count a convolution; on TPUs, every product is one, and a batch is a window over one element at a time."""
    labels = DIM_LABELS.search(instruction.attributes)
    if labels is None:
        return 0
    lhs, kernel, out = (operands[0].shapes[0], operands[1].shapes[0], instruction.shapes[0])
    spatial = [label for label in labels[3] if label.isdigit()]
    window = _window(instruction.attributes, len(spatial))
    pairs = 1
    for number, label in enumerate(spatial):
        sizes = (
            lhs.dims[labels[1].index(label)],
            kernel.dims[labels[2].index(label)],
            out.dims[labels[3].index(label)],
        )
        pairs *= _valid_pairs(*sizes, **{name: values[number] for name, values in window.items()})
    batch = out.dims[labels[3].index("b")] * out.dims[labels[3].index("f")]
    groups = re.search(r"batch_group_count=(\d+)", instruction.attributes)
    return 2 * batch * pairs * kernel.dims[labels[2].index("i")] // (int(groups[1]) if groups else 1)


def _window(attributes: str, rank: int) -> dict[str, list[int]]:
    found = re.search(r"window=\{([^}]*)\}", attributes)
    given = dict(WINDOW_FIELD.findall(found[1])) if found else {}
    defaults = {"stride": 1, "pad": 0, "lhs_dilate": 1, "rhs_dilate": 1}
    # Padding is written as `low_high`.
    return {
        name: [int(value.split("_")[0]) for value in given[name].split("x")] if name in given else [default] * rank
        for name, default in defaults.items()
    }


def _valid_pairs(size: int, kernel: int, out: int, *, stride: int, pad: int, lhs_dilate: int, rhs_dilate: int) -> int:
    """Count the pairs of window and input elements that meet, over all window positions."""
    places = np.arange(out)[:, None] * stride - pad + np.arange(kernel)[None] * rhs_dilate
    inside = (places >= 0) & (places <= (size - 1) * lhs_dilate) & (places % lhs_dilate == 0)
    return int(inside.sum())


TERMS = re.compile(r"algorithm=dot_bf16_bf16_f32(?:_x(\d))?")
"""Algorithm of a product of float32 operands split into terms of bfloat16, with the number of products."""


@dataclass(frozen=True)
class ProductForm:
    """Form of a matrix product."""

    kind: str  # `dense`, or the kind of a grouped product: `product`, `transposed` or `outer`, the gradients of weights
    # `hopper`, `mosaic` for other kernels of Mosaic, `triton`, `pallas` for kernels of this package for TPUs, `own` for
    # custom calls of this package, or `library`
    kernel: str
    dtype: str  # XLA's name of the dtype of the operands
    rows: int  # rows of the result of a dense product; rows `A` of the buffer of a grouped one
    columns: int  # columns of the result
    groups: int = 1  # groups of a grouped product; 1 for a dense one
    weight_bytes: int = 0  # bytes of the weights of all groups, or of their gradients
    passes: int = 1  # products in `dtype` for one product of wider operands, as terms of float32 in bfloat16
    padding: float = 1.0  # computed columns and depth over existing ones: the last tiles are whole


def product_form(module: Module, computation: Computation, instruction: Instruction) -> ProductForm:
    """Return the form of the largest product of an instruction."""
    if instruction.opcode in ("fusion", "async-start"):
        inside = [(part, one) for part in module.called(instruction) for one in part if flops_of(module, part, one)]
        if inside:
            return product_form(module, *max(inside, key=lambda found: flops_of(module, *found)))
    # A kernel may have an operand twice, for two blocks of it.
    unique = {one.name: one for one in computation.operands(instruction)}.values()
    operands = [_in_rows(shape, instruction) for operand in unique for shape in operand.shapes]
    results, kernel = [_in_rows(shape, instruction) for shape in instruction.shapes], _kernel_name(instruction)
    grouped = [shape for shape in (*operands, *results) if len(shape.dims) == 3]
    is_kernel = instruction.opcode == "custom-call" and "lhs_contracting_dimensions" not in instruction.attributes
    if grouped and (instruction.opcode == "ragged-dot" or (is_kernel and "fmha" not in instruction.target)):
        form = _grouped_form(operands, results, grouped, kernel)
        return replace(form, padding=_padding(instruction, operands))
    # A batch of a product counts as rows.
    dims = max(instruction.shapes, key=lambda shape: shape.nbytes).dims or (1,)
    dtype = operands[0].dtype if operands else instruction.shapes[0].dtype
    if terms := TERMS.search(instruction.attributes):
        return ProductForm("dense", kernel, "bf16", math.prod(dims[:-1]), dims[-1], passes=int(terms[1] or 1))
    return ProductForm("dense", kernel, dtype, math.prod(dims[:-1]), dims[-1])


def _in_rows(shape: ArrayShape, kernel: Instruction) -> ArrayShape:
    """Return rows of a kernel in the layout of exchanges, `[A, 2, H / 2]`, as a matrix."""
    sizes = SIZES.search(kernel.text("op_name"))
    is_words = sizes is not None and len(shape.dims) == 3 and shape.dims[0] == int(sizes[1])
    return replace(shape, dims=(shape.dims[0], math.prod(shape.dims[1:]))) if is_words else shape


def _grouped_form(
    operands: list[ArrayShape], results: list[ArrayShape], grouped: list[ArrayShape], kernel: str
) -> ProductForm:
    weights = max(grouped, key=lambda shape: shape.nbytes)
    inner, outer = weights.dims[1:]
    parts = {id(shape): shape for shape in grouped if shape.dims[1:] == weights.dims[1:]}.values()
    groups, nbytes = sum(shape.dims[0] for shape in parts), sum(shape.nbytes for shape in parts)
    flat = [shape for shape in operands if len(shape.dims) == 2]
    rows = max((max(shape.dims) for shape in flat), default=1)
    rows = max((size for shape in flat for size in set(shape.dims) - {inner, outer}), default=rows)
    dtype = flat[0].dtype if flat else weights.dtype
    if any(len(shape.dims) == 3 for shape in results):
        return ProductForm("outer", kernel, dtype, rows, outer, groups, nbytes)
    result = max(results, key=lambda shape: shape.nbytes)
    is_transposed = inner != outer and inner in result.dims and outer not in result.dims
    return ProductForm("transposed" if is_transposed else "product", kernel, dtype, rows, outer, groups, nbytes)


def _padding(instruction: Instruction, operands: list[ArrayShape]) -> float:
    """Return the computed share of the widths of a product of XLA on a TPU, 1 or more."""
    tiling = TILING.search(instruction.attributes)
    if tiling is None:
        return 1.0
    matrices = next(shape.dims for shape in (*operands, *instruction.shapes) if len(shape.dims) == 3)
    sizes = zip(matrices[1:], map(int, tiling.groups()[1:]), strict=True)
    return math.prod(math.ceil(size / tile) * tile / size for size, tile in sizes)


def _kernel_name(instruction: Instruction) -> str:
    target = instruction.target
    if "triton" in target:
        return "triton"
    if target.startswith("moe_lb_"):
        return "own"
    if target == "tpu_custom_call" and SIZES.search(instruction.text("op_name")):
        return "pallas"
    if "mosaic" in target:
        return "hopper" if SIZES.search(instruction.text("op_name")) else "mosaic"
    return "library"
