"""Temporaries at the peak are listed with their contents."""

import jax
import jax.numpy as jnp

from jax_moe_lb.aot.memory import peak_buffers, temporary_bytes
from tests.aot.programs import compiled_here, module_of


def listed(program, fast_spaces=frozenset()):
    return peak_buffers(program.module, program.dump("live-range"), program.dump("buffer-assignment"), fast_spaces)


def test_temporaries_are_listed_with_sizes_shapes_and_lines(tmp_path):
    def one_large_array(x):
        with jax.named_scope("ordered"):
            return jnp.sort(jnp.outer(x, x), 0)[0]

    found = listed(compiled_here(tmp_path, one_large_array, jnp.zeros(512)))
    line = one_large_array.__code__.co_firstlineno + 2
    assert (found[0].holds, found[0].shape, found[0].nbytes) == ("ordered/sort", "f32[512,512]", 512 * 512 * 4)
    assert found[0].source == f"tests/aot/test_memory.py:{line}"


def test_they_sum_to_the_peak(tmp_path):
    def chained(x):
        return jnp.tanh(x @ x) @ x + 1

    program = compiled_here(tmp_path, chained, jnp.zeros((256, 256)))
    most = program.compiled.memory_analysis().temp_size_in_bytes
    assert 0.9 * most <= sum(one.nbytes for one in listed(program)) <= most
    assert temporary_bytes(program.dump("buffer-assignment"), frozenset()) == most


LOOP = """
%body (state: (s32[], f32[64])) -> (s32[], f32[64]) {
  %held = f32[64]{0} get-tuple-element(%state), index=1
  %kept = f32[64]{0} copy(%held)
  %count = s32[] get-tuple-element(%state), index=0
  ROOT %next = (s32[], f32[64]{0}) tuple(%count, %kept)
}

ENTRY %main (n: s32[], x: f32[64]) -> f32[64] {
  %made = f32[64]{0} sine(%x), metadata={op_name="jit(f)/before/sin" source_file="a.py" source_line=3}
  %start = (s32[], f32[64]{0}) tuple(%n, %made)
  %while = (s32[], f32[64]{0}) while(%start), condition=%c, body=%body
  ROOT %out = f32[64]{0} get-tuple-element(%while), index=1
}
"""
ASSIGNMENT = """
allocation 0: size 256, page 0, parameter 1, shape |f32[64]| at ShapeIndex {}:
 value: <1 x @0> (size=256,offset=0): f32[64]{0}
allocation 1: size 512, color 7, page 0, preallocated-temp:
 value: <2 state{1} (phi) @7> (size=256,offset=0): f32[64]{0}
 value: <3 kept @7> (size=256,offset=256): f32[64]{0}
allocation 2: size 8, color 5, page 0, preallocated-temp:
 value: <4 count @5> (size=4,offset=0): s32[]
"""
LIVE_RANGES = """
  Live ranges at 7 (peak):
    state{1}: 256 bytes (cumulative: 256 bytes)
    kept{}: 256 bytes (cumulative: 512 bytes)
    x{}: 256 bytes (cumulative: 768 bytes)
    count{}: 4 bytes (cumulative: 772 bytes)
  Stack trace breakdown for peak usage: 772 bytes
"""


def test_the_state_of_a_loop_is_traced_to_what_made_it():
    found = peak_buffers(module_of(LOOP), LIVE_RANGES, ASSIGNMENT, frozenset({5}))
    assert [one.name for one in found] == ["state{1}", "kept"]
    assert {(one.holds, one.source, one.shape) for one in found} == {("before/sin", "a.py:3", "f32[64]")}


def test_temporaries_of_the_device_are_summed_with_their_gaps():
    assert temporary_bytes(ASSIGNMENT, frozenset({5})) == 512
    assert temporary_bytes(ASSIGNMENT, frozenset()) == 512 + 8


def test_arguments_results_and_programs_without_dumps_have_none(tmp_path):
    program = compiled_here(tmp_path, lambda x: x + 1, jnp.zeros(1000))
    assert listed(program) == peak_buffers(program.module, "", "", frozenset()) == []
    assert temporary_bytes("", frozenset()) == 0
