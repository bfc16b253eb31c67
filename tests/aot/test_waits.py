"""Host waits are counted from the thunks of XLA's GPU runtime."""

import pytest

from jax_moe_lb.aot.execution_counts import answers_from_host, host_waits, parse_thunks, planners_on_host
from tests.aot.programs import module_of, thunk_names

# XLA's format, shortened: a loop of unknown length with a nested condition, a loop of known length, and a graph with a
# condition.
SEQUENCE = """\
001: kCopy          [source       | next=002 (1)] kCopy
004: kWhile         [prev=003 (1) | next=021 (1)]   
condition:
    005: kCustomKernel [source | sink] wrapped_compare_1 grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    006: kCustomKernel [source       | sink        ] loop_add_fusion_1 grid: [1, 1, 1] threads: [1, 1, 1]
    019: kConditional  [prev=009 (1) | next=020 (1)]       
      false_branch:
        010: kCustomKernel [source       | next=011 (1)] gemm_fusion_dot_4 grid: [8192, 1, 1] threads: [64, 1, 1]
      true_branch:
        013: kWhile [prev=012 (1) | next=018 (1)]           
condition:
            014: kCustomKernel [source | sink] wrapped_compare_1 grid: [1, 1, 1] threads: [1, 1, 1]
          body:
            016: kCustomKernel [source       | next=017 (1)] gemm_fusion_dot_4 grid: [8192, 1, 1]
        018: kCopy  [prev=013 (1) | sink        ] kCopy
    020: kCopy         [prev=019 (1) | sink        ] kCopy
021: kWhile         [prev=004 (1) | next=000 (1)]   
condition:
    022: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    024: kCustomKernel [source       | next=025 (1)] gemm_fusion_dot_4 grid: [8192, 1, 1] threads: [64, 1, 1]
000: kCommandBuffer [prev=021 (1) | sink        ] 
    026: kCustomKernel [source       | next=027 (1)] input_reduce_fusion_1 grid: [64, 1, 1] threads: [256, 1, 1]
    032: kConditional  [prev=028 (1) | sink        ]       
      false_branch:
        029: kCustomKernel [source       | next=030 (1)] gemm_fusion_dot_4 grid: [8192, 1, 1] threads: [64, 1, 1]
      true_branch:
        031: kCopy [source | sink] kCopy
"""  # noqa: W291 (XLA's spaces)

METADATA = thunk_names({1: "copy.1", 4: "while.1", 13: "while.2", 21: "while.3"})
MODULE = """
ENTRY %main (x: s32[]) -> s32[] {{
  %while.1 = s32[] while(%x), condition=%c, body=%b, metadata={{op_name="{scope}/while"}}
  %while.2 = s32[] while(%x), condition=%c, body=%b
  ROOT %while.3 = s32[] while(%x), condition=%c, body=%b, backend_config={{"known_trip_count":{{"n":"5"}}}}
}}
"""

# A loop whose body calls the host, between sends to the host and to another device.
CALLBACK = """
%b (p: s32[]) -> s32[] {
  %sent = token[] send-done(%p), channel_id=1, is_host_transfer=true
  %received = (s32[], token[]) recv-done(%sent), channel_id=2, is_host_transfer=true
  %passed = (s32[], token[]) recv-done(%sent), channel_id=3
  ROOT %answer = s32[] get-tuple-element(%received), index=0
}

ENTRY %main (x: s32[]) -> s32[] {
  ROOT %while.1 = s32[] while(%x), body=%b, backend_config={"known_trip_count":{"n":"5"}}
}
"""


def kinds(thunks):
    return [(thunk.kind, thunk.label, kinds(thunk.children)) for thunk in thunks if thunk.children]


def test_the_tree_is_read():
    leaf = ("kWhile", "true_branch")
    assert kinds(parse_thunks(SEQUENCE)) == [
        ("kWhile", "", [("kConditional", "body", [(*leaf, [])])]),
        ("kWhile", "", []),
        ("kCommandBuffer", "", [("kConditional", "", [])]),
    ]


# Two evaluations of the outer loop's condition; inside, a branch and two evaluations of an inner loop's condition.
UNKNOWN = 2 + 1 + 2


@pytest.mark.parametrize(
    ("scope", "sequence", "metadata", "waits"),
    [
        ("others", SEQUENCE, METADATA, UNKNOWN),
        # A balanced step evaluates the condition once.
        ("further_rounds", SEQUENCE, METADATA, 1),
        # A loop without a name counts as one of unknown length.
        ("others", SEQUENCE, "", UNKNOWN + 2),
        ("others", "001: kCopy [source | sink] kCopy\n", METADATA, 0),
    ],
)
def test_waits_of_loops_and_branches(scope, sequence, metadata, waits):
    assert host_waits(module_of(MODULE.format(scope=scope)), sequence, metadata) == waits


def test_a_tpu_waits_for_each_answer_of_the_host():
    assert answers_from_host(module_of(CALLBACK)) == 5
    assert answers_from_host(module_of(MODULE.format(scope="others"))) == 0


# Planners in a loop of two rounds and outside of it: in host functions, in a kernel, and beside the device.
PLANNERS = """
%b (p: s32[]) -> s32[] {
  ROOT %planned = s32[] custom-call(%p), custom_call_target="moe_lb_plan_relay"
}

ENTRY %main (x: s32[]) -> s32[] {
  %exact = s32[] custom-call(%x), custom_call_target="moe_lb_plan_exact"
  %kernel = s32[] custom-call(%exact), custom_call_target="moe_lb_plan_exact_kernel"
  %beside = s32[] custom-call(%kernel), custom_call_target="moe_lb_plan_feplb_and_copy"
  ROOT %while.1 = s32[] while(%beside), body=%b, backend_config={"known_trip_count":{"n":"2"}}
}
"""


def test_planners_in_host_functions_are_waits():
    module = module_of(PLANNERS)
    assert planners_on_host(module) == 2 + 1
    assert host_waits(module, "001: kCustomCall [source | sink] call\n", "") == 2 + 1
