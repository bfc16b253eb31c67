"""Kernels of a rank's step have the part that their line of the compiled program says."""

import re

import pytest

from benchmarks.gpu import rank_kernels as kernels

SCOPE = "jit(rank_step)/transpose(jvp())/backward"
CALL, FUSION = 'custom-call(%a), custom_call_target="mosaic_gpu_v2"', "fusion(%a), kind=kLoop"
PARTS = [
    ("bf16[68864,768]{1,0}", CALL, "experts/call", kernels.PRODUCTS),
    ("bf16[68864,2048]{1,0}", "custom-call(%a)", "dispatch/copy_rows/pallas_call", kernels.EXCHANGE),
    ("(bf16[65536,1,2048]{2,1,0}, s32[8]{0})", FUSION, "dispatch/gather", kernels.GATHERS),
    ("bf16[8192,2048]{1,0}", FUSION, "combine/convert_element_type", kernels.SUMS),
    ("bf16[18,2048,768]{2,1,0}", FUSION, "experts/layout_constraint", kernels.WEIGHTS),
    ("bf16[68864,1536]{1,0}", FUSION, "experts/concatenate", kernels.ACTIVATIONS),
    ("(bf16[2,1,2048,768]{3,2,1,0})", FUSION, "replicate/gather", kernels.REPLICAS),
    ("s32[65536]{0}", FUSION, "combine/scatter-add", kernels.SMALL),
    ("bf16[65536,2048]{1,0}", "copy(%a)", None, kernels.OTHER),
]
"""Result, operation and scope of an instruction, and its part."""


@pytest.mark.parametrize(("result", "operation", "scope", "part"), PARTS)
@pytest.mark.parametrize("root", ["", "ROOT "])
def test_the_part_of_an_instruction(root, result, operation, scope, part):
    metadata = "" if scope is None else f', metadata={{op_name="{SCOPE}/{scope}"}}'
    (found,) = kernels.parts_of(f"HloModule m\n\n  {root}%f.1 = {result} {operation}{metadata}\n").values()
    assert found == (part, re.search(r"\w+\[[\d,]+\]", result)[0])


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
