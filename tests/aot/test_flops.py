"""Products are counted as written, independent of the compiled operation."""

import jax
import jax.numpy as jnp
import pytest

from jax_moe_lb.aot.execution_counts import total
from jax_moe_lb.aot.flops import product_form, products
from jax_moe_lb.aot.hlo import parse_module
from tests.aot.programs import compiled_here


def test_products_of_a_program(exchanging):
    # One of [16, 16], and five of two [16, 16] in parallel.
    assert total(products(exchanging.module)) == 2 * 16**3 + 5 * 2 * 2 * 16**3


def test_a_product_with_batches(tmp_path):
    operands = jnp.zeros((3, 4, 5)), jnp.zeros((3, 5, 6))
    program = compiled_here(tmp_path, lambda a, b: jnp.einsum("bij,bjk->bik", a, b), *operands)
    assert total(products(program.module)) == 2 * 3 * 4 * 5 * 6


def test_the_dearest_branch_counts(tmp_path):
    def branches(n, x):
        return jax.lax.switch(n, [lambda x: x @ x, lambda x: x @ x @ x, lambda x: x + 1], x)

    program = compiled_here(tmp_path, branches, jnp.int32(0), jnp.zeros((16, 16)))
    assert total(products(program.module)) == 2 * 2 * 16**3


@pytest.mark.parametrize(("scope", "rounds"), [("further_rounds", 0), ("others", 1)])
def test_a_loop_of_unknown_length_counts_once_and_one_of_further_rounds_never(tmp_path, scope, rounds):
    def in_rounds(n, x):
        with jax.named_scope(scope):
            return jax.lax.fori_loop(1, n, lambda i, x: x @ x, x @ x)

    program = compiled_here(tmp_path, in_rounds, jnp.int32(1), jnp.zeros((16, 16)))
    assert total(products(program.module)) == (1 + rounds) * 2 * 16**3


ONE = """
ENTRY %main ({parameters}) -> f32[] {{
{instructions}
}}
"""


def module_of(instruction, *shapes):
    lines = [f"  %p{i} = {shape} parameter({i})" for i, shape in enumerate(shapes)]
    return parse_module(ONE.format(parameters="", instructions="\n".join([*lines, f"  ROOT %one = {instruction}"])))


def flops_of(instruction, *shapes):
    return total(products(module_of(instruction, *shapes)))


RAGGED = "rhs_contracting_dims={1}, lhs_ragged_dims={0}, rhs_group_dims={0}"
KERNEL = 'custom-call(%p0, %p1, %p2), custom_call_target="mosaic_gpu_v2"'
CUBLAS = '"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}'
ROWS = ("bf16[64,5]", "bf16[3,5,7]", "s32[9]")
CASES = {
    "ragged product": (
        f"f32[64,7] ragged-dot(%p0, %p1, %p2), lhs_contracting_dims={{1}}, {RAGGED}",
        ("f32[64,5]", "f32[3,5,7]", "s32[3]"),
        64 * 5 * 7,
    ),
    "gradient of its weights": (
        "f32[3,5,7] ragged-dot(%p0, %p1, %p2), lhs_contracting_dims={0}, rhs_contracting_dims={0}, lhs_ragged_dims={0}",
        ("f32[64,5]", "f32[64,7]", "s32[3]"),
        64 * 5 * 7,
    ),
    "kernel": (f"bf16[64,7] {KERNEL}", ROWS, 64 * 5 * 7),
    "kernel of transposed weights": (f"bf16[64,5] {KERNEL}", ("bf16[64,7]", *ROWS[1:]), 64 * 5 * 7),
    "kernel of a gradient": (f"f32[3,5,7] {KERNEL}", ("s32[3]", "bf16[5,64]", "bf16[64,7]"), 64 * 5 * 7),
    "cuBLAS": (
        f'(f32[4,6]{{1,0}}, s8[33]{{0}}) custom-call(%p0, %p1), custom_call_target="__cublas$gemm", {CUBLAS}',
        ("f32[4,5]", "f32[5,6]"),
        4 * 5 * 6,
    ),
    "planner": ('bf16[64,7] custom-call(%p0, %p1, %p2), custom_call_target="moe_lb_plan_exact"', ROWS, 0),
    "convolution": ("f32[4,6] convolution(%p0, %p1), dim_labels=bf_io->bf", ("f32[4,5]", "f32[5,6]"), 4 * 5 * 6),
    # TPUs dilate one side, so that every window position matches one batch only.
    "convolution over batches": (
        "f32[3,4,6] convolution(%p0, %p1), window={size=3 stride=2 lhs_dilate=3}, dim_labels=0bf_0io->0bf",
        ("f32[3,4,5]", "f32[3,5,6]"),
        3 * 4 * 5 * 6,
    ),
    "convolution with padding": (
        "f32[1,8,1] convolution(%p0, %p1), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f",
        ("f32[1,8,1]", "f32[3,1,1]"),
        8 * 3 - 2,
    ),
}
"""Instruction, shapes of the operands, and multiply-adds: every row of a grouped product counts once."""


@pytest.mark.parametrize("case", CASES)
def test_products_of_an_instruction(case):
    instruction, shapes, expected = CASES[case]
    assert flops_of(instruction, *shapes) == 2 * expected


@pytest.mark.parametrize(("rows", "result", "kind"), [(5, 7, "product"), (7, 5, "transposed")])
def test_a_triton_product_with_matrices_in_parts(rows, result, kind):
    operands = (*("s32[12]",) * 3, f"bf16[64,{rows}]", "bf16[2,5,7]", "bf16[1,5,7]")
    names = ", ".join(f"%p{i}" for i in range(len(operands)))
    call = f'bf16[64,{result}] custom-call({names}), custom_call_target="__gpu$xla.gpu.triton"'
    assert flops_of(call, *operands) == 2 * 64 * 5 * 7
    module = module_of(call, *operands)
    entry = module.computations[module.entry]
    form = product_form(module, entry, entry.root)
    assert (form.kind, form.kernel, form.rows, form.groups) == (kind, "triton", 64, 3)


@pytest.mark.parametrize(("target", "kernel"), [("mosaic_gpu_v2", "hopper"), ("tpu_custom_call", "pallas")])
def test_a_kernel_of_this_package_has_the_sizes_of_its_products_in_its_name(target, kernel):
    """One kernel multiplies by up and gate, in parts, and activates the products."""
    operands = ("bf16[64,5]", "bf16[2,5,7]", "bf16[1,5,7]", "bf16[2,5,7]", "bf16[1,5,7]", "s32[12]")
    names = ", ".join(f"%p{i}" for i in range(len(operands)))
    metadata = 'metadata={op_name="jit(moe)/experts/grouped_hidden_64x5x14/mpmd_map"}'
    call = f'bf16[64,7] custom-call({names}), custom_call_target="{target}", {metadata}'
    assert flops_of(call, *operands) == 2 * 64 * 5 * 7 * 2
    module = module_of(call, *operands)
    entry = module.computations[module.entry]
    form = product_form(module, entry, entry.root)
    assert (form.kernel, form.padding) == (kernel, 1.0)


@pytest.mark.parametrize(
    ("tiling", "shapes", "result", "padding"),
    [
        ("128,2048,640", ["bf16[256,2048]", "bf16[3,2048,768]"], "bf16[256,768]", 1280 / 768),
        ("128,768,1664", ["bf16[256,768]", "bf16[3,768,2048]"], "bf16[256,2048]", 3328 / 2048),
        ("128,2048,256", ["bf16[256,2048]", "bf16[256,1536]"], "bf16[3,2048,1536]", 1.0),
    ],
)
def test_a_product_of_xla_on_a_tpu_computes_whole_tiles(tiling, shapes, result, padding):
    attributes = f'custom_call_target="tpu_custom_call", frontend_attributes={{ragged_dot_tiling="{tiling}"}}'
    module = module_of(f"{result} custom-call(%p0, %p1), {attributes}", *shapes)
    entry = module.computations[module.entry]
    assert product_form(module, entry, entry.root).padding == pytest.approx(padding)


@pytest.mark.parametrize(("target", "products"), [("fmhaSoftmax", 2), ("fmhaSoftmaxBackward", 5)])
@pytest.mark.parametrize(("mask", "half"), [("NO_MASK", 1), ("CAUSAL", 2)])
def test_attention_counts_its_products_over_all_pairs(target, products, mask, half):
    config = (
        '{"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"element_type":"BF16",'
        f'"dimensions":["2","8","32","64"]}},"mask_type":"{mask}",'
        '"bmm1_dot_dimension_numbers":{"lhs_contracting_dimensions":["3"]}}}'
    )
    call = f'bf16[2,8,32,16] custom-call(%p0, %p1), custom_call_target="__cudnn${target}", backend_config={config}'
    assert flops_of(call, "bf16[2,32,8,16]", "bf16[2,64,8,16]") == products * 2 * (2 * 8 * 32 * 64) * 16 // half
