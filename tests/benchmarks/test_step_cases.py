"""Classes of operations and sizes of the training steps that `make gpu` measures."""

import pytest

from benchmarks.gpu.step_cases import CASES, TINY, class_of, operations_of
from jax_moe_lb.aot.product_form import ProductForm
from jax_moe_lb.aot.schedule import Kind, Loop, ScheduledOperation


def operation(name, kind=Kind.KERNEL, product=None, body=()):
    return ScheduledOperation(name, kind, "other", product=product, body=body)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (operation("input_scatter_fusion.2"), "scatters"),
        (operation("loop_gather_fusion"), "gathers"),
        (operation("loop_pad_fusion.1"), "copies and pads"),
        (operation("input_reduce_slice_fusion"), "reductions"),
        (operation("loop_add_fusion.11"), "elementwise"),
        (operation("ragged-all-to-all.1", Kind.EXCHANGE), "exchanges"),
        (operation("while", Kind.LOOP), "waits of the host"),
        (
            operation("dot_product_attention_bwd.7", Kind.PRODUCT, ProductForm("dense", "library", "bf16", 8, 8)),
            "attention",
        ),
        (operation("gemm_fusion_dot.8", Kind.PRODUCT, ProductForm("dense", "library", "bf16", 8, 8)), "dense products"),
        (operation("mpmd_map.2", Kind.PRODUCT, ProductForm("outer", "triton", "bf16", 8, 8)), "grouped: outer, triton"),
    ],
)
def test_an_operation_is_in_the_class_of_its_work(one, expected):
    assert class_of(one) == expected


def test_operations_of_loops_are_listed():
    inner = operation("copy.1")
    outer = ScheduledOperation("while.2", Kind.LOOP, "other", loop=Loop.COUNTED, trips=3, body=(inner,))
    assert [one.name for one in operations_of((outer,))] == ["while.2", "copy.1"]


@pytest.mark.parametrize("name", CASES)
def test_a_case_has_the_sizes_of_its_model(name):
    decoder = CASES[name].decoder
    assert decoder.num_layers == CASES[name].layers
    assert CASES[name].ideal_flops > 0


def test_the_small_model_has_the_attention_kernel_of_the_large_one():
    small, large = TINY.decoder, CASES["qwen3"].decoder
    assert (small.latent is None, small.sinks, small.window(0)) == (large.latent is None, large.sinks, large.window(0))
