"""Loops in TPU form, whose length appears in their condition only."""

import pytest

from jax_moe_lb.aot.execution_counts import rounds_of, with_counted_loops
from tests.aot.programs import module_of

PROGRAM = """HloModule counting

%body (state: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %step = s32[] constant({step})
  %i = s32[] get-tuple-element(%state), index=0
  %copy.1 = s32[]{{:T(128)S(6)}} copy(%i)
  %next = s32[] add(%copy.1, %step)
  %x = f32[4] get-tuple-element(%state), index=1
  ROOT %both = (s32[], f32[4]) tuple(%next, %x)
}}

%condition (state.1: (s32[], f32[4])) -> pred[] {{
  %stop = s32[] constant({stop})
  %i.1 = s32[] get-tuple-element(%state.1), index={index}
  ROOT %goes_on = pred[] compare(%i.1, %stop), direction={direction}
}}

ENTRY %main (x.1: f32[4], n: s32[]) -> (s32[], f32[4]) {{
  %zero = s32[] constant({start})
  %copy.2 = s32[] copy(%{first})
  %begin = (s32[], f32[4]) tuple(%copy.2, %x.1)
  ROOT %loop = (s32[], f32[4]) while(%begin), condition=%condition, body=%body
}}
"""
USUAL = {"start": 0, "stop": 6, "step": 1, "index": 0, "direction": "LT", "first": "zero"}


@pytest.mark.parametrize(
    ("case", "rounds"),
    [
        ({}, 6),
        ({"start": 2}, 4),
        ({"step": 4}, 2),
        ({"start": 9}, 0),
        # Loops of unknown length, which count once.
        ({"first": "n"}, None),
        ({"direction": "NE"}, None),
        ({"step": 0}, None),
        ({"step": -1}, None),
        ({"index": 1}, None),
    ],
    ids=str,
)
def test_rounds_are_read_off_the_condition(case, rounds):
    module = with_counted_loops(module_of(PROGRAM.format(**USUAL | case)))
    loop = module.computations["main"].root
    # Without the compiler's own count, a host may wait in the loop.
    assert (loop.counted, loop.trips) == (rounds, None)
    assert rounds_of(loop) == (1 if rounds is None else rounds)


def test_what_the_compiler_says_counts_first():
    known = PROGRAM.replace("body=%body", 'body=%body, backend_config={{"known_trip_count":{{"n":"3"}}}}')
    loop = with_counted_loops(module_of(known.format(**USUAL))).computations["main"].root
    assert (loop.counted, loop.trips, rounds_of(loop)) == (None, 3, 3)
