"""Forms of matrix products in compiled programs: dense or grouped, shapes and kernels."""

import math
import re
from dataclasses import dataclass

from jax_moe_lb.aot.flops import SIZES, flops_of
from jax_moe_lb.aot.hlo import ArrayShape, Computation, Instruction, Module

TERMS = re.compile(r"algorithm=dot_bf16_bf16_f32(?:_x(\d))?")
"""Algorithm of a product of float32 operands split into terms of bfloat16, with the number of products."""


@dataclass(frozen=True)
class ProductForm:
    """Form of a matrix product."""

    kind: str  # `dense`, or the kind of a grouped product: `product`, `transposed` or `outer`, the gradients of weights
    # `hopper`, `mosaic` for other kernels of Mosaic, `triton`, `own` for custom calls of this package, or `library`
    kernel: str
    dtype: str  # XLA's name of the dtype of the operands
    rows: int  # rows of the result of a dense product; rows `A` of the buffer of a grouped one
    columns: int  # columns of the result
    groups: int = 1  # groups of a grouped product; 1 for a dense one
    weight_bytes: int = 0  # bytes of the weights of all groups, or of their gradients
    passes: int = 1  # products in `dtype` for one product of wider operands, as terms of float32 in bfloat16


def product_form(module: Module, computation: Computation, instruction: Instruction) -> ProductForm:
    """Return the form of the largest product of an instruction."""
    if instruction.opcode in ("fusion", "async-start"):
        inside = [(part, one) for part in module.called(instruction) for one in part if flops_of(module, part, one)]
        if inside:
            return product_form(module, *max(inside, key=lambda found: flops_of(module, *found)))
    operands = [shape for operand in computation.operands(instruction) for shape in operand.shapes]
    kernel = _kernel(instruction)
    grouped = [shape for shape in (*operands, *instruction.shapes) if len(shape.dims) == 3]
    is_kernel = instruction.opcode == "custom-call" and "lhs_contracting_dimensions" not in instruction.attributes
    if grouped and (instruction.opcode == "ragged-dot" or (is_kernel and "fmha" not in instruction.target)):
        return _grouped(operands, instruction.shapes, grouped, kernel)
    # A batch of a product counts as rows.
    dims = max(instruction.shapes, key=lambda shape: shape.nbytes).dims or (1,)
    dtype = operands[0].dtype if operands else instruction.shapes[0].dtype
    if terms := TERMS.search(instruction.attributes):
        return ProductForm("dense", kernel, "bf16", math.prod(dims[:-1]), dims[-1], passes=int(terms[1] or 1))
    return ProductForm("dense", kernel, dtype, math.prod(dims[:-1]), dims[-1])


def _grouped(
    operands: list[ArrayShape], results: tuple[ArrayShape, ...], grouped: list[ArrayShape], kernel: str
) -> ProductForm:
    weights = max(grouped, key=lambda shape: shape.nbytes)
    inner, outer = weights.dims[1:]
    parts = {id(shape): shape for shape in grouped if shape.dims[1:] == weights.dims[1:]}.values()
    groups, nbytes = sum(shape.dims[0] for shape in parts), sum(shape.nbytes for shape in parts)
    flat = [shape for shape in operands if len(shape.dims) == 2]
    rows = max((max(shape.dims) for shape in flat), default=1) if flat else 1
    widths = {inner, outer}
    sides = [set(shape.dims) - widths for shape in flat]
    rows = max((size for side in sides for size in side), default=rows)
    dtype = flat[0].dtype if flat else weights.dtype
    is_outer = any(len(shape.dims) == 3 for shape in results)
    if is_outer:
        return ProductForm("outer", kernel, dtype, rows, outer, groups, nbytes)
    result = max(results, key=lambda shape: shape.nbytes)
    is_transposed = inner != outer and inner in result.dims and outer not in result.dims
    return ProductForm("transposed" if is_transposed else "product", kernel, dtype, rows, outer, groups, nbytes)


def _kernel(instruction: Instruction) -> str:
    target = instruction.target
    if "triton" in target:
        return "triton"
    if target.startswith("moe_lb_"):
        return "own"
    if "mosaic" in target:
        return "hopper" if SIZES.search(instruction.text("op_name")) else "mosaic"
    return "library"
