"""Memory traffic of operations: bytes read and written."""

import jax.numpy as jnp

from jax_moe_lb.aot.execution_counts import total
from jax_moe_lb.aot.memory import MemoryTraffic
from tests.aot.programs import compiled_here, module_of

KB = 1024


def moved(program):
    return {cost.instruction.opcode: cost.total for cost in MemoryTraffic(program.module).costs()}


def test_an_elementwise_operation_reads_and_writes(tmp_path):
    program = compiled_here(tmp_path, lambda x, y: jnp.sin(x) + y, jnp.zeros(256), jnp.zeros(256))
    assert sum(moved(program).values()) == 3 * KB


def test_a_gather_reads_what_it_picks(tmp_path):
    program = compiled_here(tmp_path, lambda x, i: x[i], jnp.zeros((1000, 256)), jnp.zeros(8, jnp.int32))
    assert 2 * 8 * KB <= sum(moved(program).values()) < 3 * 8 * KB


def test_a_loop_moves_as_often_as_it_runs(exchanging):
    module = exchanging.module
    costs = MemoryTraffic(module).costs()
    entry = module.computations[module.entry]
    assert all((cost.computation is entry) == (cost.times == 1) for cost in costs)
    assert {cost.times for cost in costs} == {1, 5}
    assert total(costs) > 0


TEXT = """
%update (big: f32[1024,256], rows: f32[1,256], at: s32[]) -> f32[1024,256] {
  %zero = s32[] constant(0)
  ROOT %dus = f32[1024,256]{1,0} dynamic-update-slice(%big, %rows, %at, %zero)
}

%nested (n: f32[1024,256], i: s32[]) -> f32[1,256] {
  %none = s32[] constant(0)
  ROOT %pick = f32[1,256]{1,0} dynamic-slice(%n, %i, %none), dynamic_slice_sizes={1,256}
}

%picks (p: f32[1024,256], j: s32[]) -> f32[1,256] {
  %c = bf16[1024,256]{1,0} convert(%p)
  ROOT %inner = f32[1,256]{1,0} fusion(%p, %j), kind=kLoop, calls=%nested
}

%later (a: f32[1024,256], b: f32[1,256], d: s32[]) -> f32[1024,256] {
  ROOT %updated = f32[1024,256]{1,0} fusion(%a, %b, %d), kind=kLoop, calls=%update
}

%hands_on (h: f32[1024,256]) -> bf16[256,1024] {
  %narrow = bf16[1024,256]{1,0} convert(%h)
  ROOT %turned = bf16[256,1024]{1,0} transpose(%narrow), dimensions={1,0}
}

ENTRY %main (x: f32[1024,256], r: f32[1,256], k: s32[]) -> f32[1024,256] {
  %in_place = f32[1024,256]{1,0} fusion(%x, %r, %k), kind=kLoop, calls=%update
  %start = ((f32[1024,256], f32[1,256], s32[]), f32[1024,256]{1,0}, u32[]) async-start(%x, %r, %k), calls=%later
  %short = ((f32[1024,256], f32[1,256], s32[]), f32[1024,256]{1,0}, u32[]) fusion-start(%x, %r, %k), calls=%update
  %shorter = f32[1024,256]{1,0} fusion-done(%short)
  %wrapped = ((f32[1024,256], f32[1,256], s32[]), f32[1024,256]{1,0}, u32[]) fusion-start(%x, %r, %k), calls=%later
  %wrapping = f32[1024,256]{1,0} fusion-done(%wrapped)
  %beside = f32[1024,256]{1,0} async-done(%start)
  %picked = f32[1,256]{1,0} fusion(%x, %k), kind=kLoop, calls=%picks
  %transposed = bf16[256,1024]{1,0} fusion(%x), kind=kLoop, calls=%hands_on
  %to_fast = (f32[1024,256]{1,0:S(1)}, f32[1024,256]{1,0}, u32[]) copy-start(%x)
  %fast = f32[1024,256]{1,0:S(1)} copy-done(%to_fast)
  %ours = (f32[1024,256]{1,0}, s32[]) custom-call(%x, %k), custom_call_target="moe_lb_copy_join"
  %theirs = f32[1024,256]{1,0} custom-call(%x), custom_call_target="mosaic_gpu_v2"
  %moe_allocate.1 = f32[1024,256]{1,0} custom-call(%r), custom_call_target="tpu_custom_call"
  ROOT %view = f32[1024,256]{1,0} bitcast(%in_place)
}
"""


def test_operations_move_what_they_read_and_write():
    module = module_of(TEXT)
    moved = {cost.instruction.name: cost.amount for cost in MemoryTraffic(module, frozenset({1})).costs()}
    # An update reads and writes the row, and reads the index; beside other work it counts at the end.
    update = 2 * KB + 4
    assert moved == {
        **dict.fromkeys(("in_place", "beside", "shorter", "wrapping"), update),
        # A slice inside a nested fusion; the unused conversion reads no bytes.
        "picked": 2 * KB + 4,
        "transposed": KB * KB + KB * KB // 2,
        # A copy into fast memory only reads.
        "fast": KB * KB,
        # Our custom calls take most operands for ordering only, and views and allocations move nothing.
        "theirs": 2 * KB * KB,
    }
