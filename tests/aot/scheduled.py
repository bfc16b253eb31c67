"""A scheduled program of one layer on 8 ranks, written by hand: 512 copies of 256 channels, 16 experts, 2 home each."""

import numpy as np

from jax_moe_lb.aot.execution_counts import Launches
from jax_moe_lb.aot.load import LayerLoad, slices
from jax_moe_lb.aot.memory import MemoryTraffic
from jax_moe_lb.aot.schedule import ScheduledOperation, scheduled
from jax_moe_lb.collectives.exchange_paths import ExchangePath, PathChoice
from jax_moe_lb.core.plan import plain_plan
from jax_moe_lb.core.topology import Topology
from tests.aot.programs import module_of

LISTS = "%n, %n, %n, %n"
GROUPS = "replica_groups={{0,1,2,3,4,5,6,7}}"

TEXT = """
%body (carry: (s32[], bf16[512,256])) -> (s32[], bf16[512,256]) {
  %i = s32[] get-tuple-element(%carry), index=0
  %rows = bf16[512,256]{1,0} get-tuple-element(%carry), index=1
  %n = s32[16]{0} constant({...})
  %more = bf16[640,256]{1,0} custom-call(), custom_call_target="AllocateBuffer", metadata={op_name="jit(f)/further_rounds/while/body/dispatch/empty"}
  %again = bf16[640,256]{1,0} ragged-all-to-all(%rows, %more, LISTS), GROUPS
  ROOT %next = (s32[], bf16[512,256]{1,0}) tuple(%i, %rows)
}

%condition (state: (s32[], bf16[512,256])) -> pred[] {
  %count = s32[] get-tuple-element(%state), index=0
  ROOT %less = pred[] compare(%count, %count), direction=LT
}

%tripled (t: f32[1024,256]) -> f32[1024,256] {
  ROOT %sine = f32[1024,256]{1,0} sine(%t)
}

%always (u: f32[1024,256]) -> pred[] {
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (x: bf16[512,256], w: bf16[2,256,128], n: s32[16], y: f32[1024,256]) -> bf16[512,256] {
  %counts = s32[16]{0} negate(%n), metadata={op_name="jit(f)/count/neg"}
  %gathered = s32[128]{0} all-gather(%counts), GROUPS, dimensions={0}, metadata={op_name="jit(f)/count/all_gather"}
  %planned = s32[128]{0} custom-call(%gathered), custom_call_target="moe_lb_plan_exact", metadata={op_name="jit(f)/plan/ffi_call"}
  %buffer = bf16[640,256]{1,0} custom-call(), custom_call_target="AllocateBuffer", metadata={op_name="jit(f)/dispatch/empty"}
  %start = ((bf16[512,256]{1,0}, bf16[640,256]{1,0}), bf16[640,256]{1,0}) ragged-all-to-all-start(%x, %buffer, LISTS), GROUPS
  %shared = f32[1024,256]{1,0} cosine(%y), metadata={op_name="jit(f)/shared/cos"}
  %done = bf16[640,256]{1,0} ragged-all-to-all-done(%start)
  %hidden = bf16[640,128]{1,0} custom-call(%done, %w, %n), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/experts/pallas_call"}
  %out = bf16[640,256]{1,0} custom-call(%hidden, %w, %n), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/experts/pallas_call"}
  %view = bf16[640,256]{1,0} bitcast(%out)
  %results = bf16[512,256]{1,0} custom-call(), custom_call_target="AllocateBuffer", metadata={op_name="jit(f)/empty"}
  %back = bf16[512,256]{1,0} ragged-all-to-all(%view, %results, LISTS), GROUPS
  %zero = s32[] constant(0)
  %first = (s32[], bf16[512,256]{1,0}) tuple(%zero, %back)
  %rounds = (s32[], bf16[512,256]{1,0}) while(%first), condition=%condition, body=%body, metadata={op_name="jit(f)/further_rounds/while"}
  %thrice = f32[1024,256]{1,0} while(%y), condition=%always, body=%tripled, backend_config={"known_trip_count":{"n":"3"}}, metadata={op_name="jit(f)/transpose(jvp(route))/while"}
  ROOT %last = bf16[512,256]{1,0} get-tuple-element(%rounds), index=1
}
""".replace("LISTS", LISTS).replace("GROUPS", GROUPS)  # noqa: E501 (XLA's lines)

AXES = {"expert": 8}


def schedule(
    text: str = TEXT, path: ExchangePath = ExchangePath.ONE_SHOT, launches: Launches = Launches()
) -> tuple[ScheduledOperation, ...]:
    whole = module_of(text)
    return scheduled(whole, MemoryTraffic(whole), AXES, lambda axes: PathChoice(path, "told"), launches)


def load_of(counts: np.ndarray, capacity: int = 640) -> LayerLoad:
    """Return the load of plain expert parallelism."""
    plan = plain_plan(counts, Topology.flat(len(counts)))
    return LayerLoad("given", (slices(counts, plan),), 512, capacity, plan)


def even_counts() -> np.ndarray:
    return np.full((8, 16), 32, np.int32)


def skewed_counts() -> np.ndarray:
    """All copies of all ranks for the experts of the last rank: 4096 rows, seven rounds."""
    counts = np.zeros((8, 16), np.int32)
    counts[:, 14:] = 256
    return counts
