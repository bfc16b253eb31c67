"""Floating-point operations of a program's products: two per multiply-add.

The operations of kernels in custom calls follow from the shapes of the operands. A grouped kernel counts every row of
its buffer once, regardless of the group and of whether a token fills it.
"""

import itertools
import json
import math
import re

import numpy as np

from jax_moe_lb.aot.execution_counts import OperationCost, executed
from jax_moe_lb.aot.hlo import ArrayShape, Computation, Instruction, Module

GEMM_TARGETS = re.compile(r"__cublas\$|__cudnn\$|__triton|triton|mosaic|pallas|tpu_custom_call|xla\.gpu")
"""Custom calls that may contain products."""

SCORES = re.compile(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]')
"""Shape of the attention scores over all pairs of tokens, which cuDNN never writes."""

SIZES = re.compile(r"\bgrouped_\w+?_(\d+)x(\d+)x(\d+)\b")
"""Sizes of the product in the name of a Hopper kernel of this package."""

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
