"""Kernels of a rank's step have the part that their line of the compiled program says."""

import pytest

from benchmarks.gpu import rank_kernels as kernels

SCOPE = 'metadata={op_name="jit(rank_step)/transpose(jvp())/backward'
LINES = {
    f'  %p.1 = bf16[68864,768]{{1,0}} custom-call(%a), custom_call_target="mosaic_gpu_v2", {SCOPE}/experts/call"}}': (
        kernels.PRODUCTS,
        "bf16[68864,768]",
    ),
    f'  %p.2 = bf16[68864,2048]{{1,0}} custom-call(%a), {SCOPE}/dispatch/copy_rows/pallas_call"}}': (
        kernels.EXCHANGE,
        "bf16[68864,2048]",
    ),
    f'  %f.1 = (bf16[65536,1,2048]{{2,1,0}}, s32[8]{{0}}) fusion(%a), {SCOPE}/dispatch/gather"}}': (
        kernels.GATHERS,
        "bf16[65536,1,2048]",
    ),
    f'  ROOT %f.2 = bf16[8192,2048]{{1,0}} fusion(%a), kind=kLoop, {SCOPE}/combine/convert_element_type"}}': (
        kernels.SUMS,
        "bf16[8192,2048]",
    ),
    f'  %f.3 = bf16[18,2048,768]{{2,1,0}} fusion(%a), {SCOPE}/experts/layout_constraint"}}': (
        kernels.WEIGHTS,
        "bf16[18,2048,768]",
    ),
    f'  %f.4 = bf16[68864,1536]{{1,0}} fusion(%a), {SCOPE}/experts/concatenate"}}': (
        kernels.ACTIVATIONS,
        "bf16[68864,1536]",
    ),
    f'  %f.5 = (bf16[2,1,2048,768]{{3,2,1,0}}) fusion(%a), {SCOPE}/replicate/gather"}}': (
        kernels.REPLICAS,
        "bf16[2,1,2048,768]",
    ),
    f'  %f.6 = s32[65536]{{0}} fusion(%a), {SCOPE}/combine/scatter-add"}}': (kernels.SMALL, "s32[65536]"),
    "  %f.7 = bf16[65536,2048]{1,0} copy(%a)": (kernels.OTHER, "bf16[65536,2048]"),
}


@pytest.mark.parametrize(("line", "expected"), LINES.items())
def test_the_part_of_an_instruction(line, expected):
    (found,) = kernels.parts_of(f"HloModule m\n\n{line}\n").values()
    assert found == expected


def test_times_are_summed_by_part():
    rows = [
        ["4", "exact", kernels.SUMS, "f.2", "", 1.0, 1.0],
        ["4", "exact", kernels.PRODUCTS, "p.1", "", 1.0, 2.0],
        ["4", "exact", kernels.PRODUCTS, "p.3", "", 4.0, 3.0],
        ["even", "exact", kernels.PRODUCTS, "p.3", "", 4.0, 7.0],
        ["4", "plain", kernels.PRODUCTS, "p.1", "", 1.0, 9.0],
        ["4", "exact", kernels.WHOLE, "", "", None, 8.0],
    ]
    assert list(kernels.by_part(rows, "exact").items()) == [(kernels.PRODUCTS, 5.0), (kernels.SUMS, 1.0)]


def test_saved_activations_are_not_multiplied_again():
    rematerialized, saved = (kernels.floor_ms(kernels.TINY, name, 1000) for name in kernels.PROFILED[::2])
    assert rematerialized / saved == pytest.approx(22 / 18)
