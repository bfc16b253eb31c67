"""The schedule of a program keeps kind, stage, form and place of every operation."""

import json
from dataclasses import asdict

import pytest

from jax_moe_lb.aot.execution_counts import Launches, launches
from jax_moe_lb.aot.schedule import Kind, Loop, stage_of
from tests.aot.programs import thunk_names
from tests.aot.scheduled import GROUPS, LISTS, TEXT, schedule


@pytest.fixture(scope="module")
def by_name():
    return {one.name: one for one in schedule()}


def test_operations_are_in_order_with_kinds_and_stages(by_name):
    """Without views and parameters."""
    assert [(name, one.kind, one.stage) for name, one in by_name.items()] == [
        ("counts", Kind.KERNEL, "count"),
        ("gathered", Kind.COLLECTIVE, "count"),
        ("planned", Kind.PLANNER, "plan"),
        # Exchanges have no name of their own: the buffer for the rows has it.
        ("start", Kind.EXCHANGE, "dispatch"),
        ("shared", Kind.KERNEL, "other"),
        ("done", Kind.WAIT, "other"),
        ("hidden", Kind.PRODUCT, "experts"),
        ("out", Kind.PRODUCT, "experts"),
        # Rows of the experts travel back.
        ("back", Kind.EXCHANGE, "combine"),
        ("rounds", Kind.LOOP, "other"),
        ("thrice", Kind.LOOP, "backward/route"),
    ]


@pytest.mark.parametrize(("scope", "stage"), [("backward/replicate", "backward/replicate"), ("experts", "combine")])
def test_an_exchange_with_a_name_has_its_stage(scope, stage):
    """Unless it is the name of the products before it."""
    back = f"ragged-all-to-all(%view, %results, {LISTS}), {GROUPS}"
    named = TEXT.replace(back, f'{back}, metadata={{op_name="jit(f)/{scope}/ragged_all_to_all"}}')
    assert {one.name: one.stage for one in schedule(named)}["back"] == stage


def test_an_exchange_keeps_its_shape(by_name):
    start, back = by_name["start"].exchange, by_name["back"].exchange
    assert (start.nbytes, start.result_bytes, start.operand_rows) == (512 * 512, 640 * 512, 512)
    assert (start.updates, start.num_ranks, start.axes, start.path) == (2, 8, ("expert",), "one-shot kernel")
    assert (back.nbytes, back.result_bytes) == (640 * 512, 512 * 512)
    assert by_name["start"].runs_beside
    assert not by_name["back"].runs_beside
    assert by_name["done"].awaits == "start"


def test_a_grouped_product_keeps_its_form(by_name):
    hidden, out = by_name["hidden"].product, by_name["out"].product
    assert (hidden.kind, hidden.kernel, hidden.rows, hidden.groups) == ("product", "mosaic", 640, 2)
    assert out.kind == "transposed"
    assert hidden.weight_bytes == 2 * 256 * 128 * 2
    assert by_name["hidden"].flops == 2 * 640 * 256 * 128


def test_loops_keep_their_operations_once(by_name):
    rounds, thrice = by_name["rounds"], by_name["thrice"]
    assert (rounds.loop, {one.stage for one in rounds.body}) == (Loop.ROUNDS, {"dispatch", "other"})
    assert (thrice.loop, thrice.trips, [one.name for one in thrice.body]) == (Loop.COUNTED, 3, ["sine"])


@pytest.mark.parametrize("name", ["often", "sends"])
def test_the_most_expensive_branch_is_scheduled(name):
    """Iterations of a loop count, and bytes of an exchange."""
    often = "%often = f32[1024,256]{1,0} while(%v), condition=%always, body=%tripled, "
    often += 'backend_config={"known_trip_count":{"n":"99"}}'
    sends = "%sends = f32[4096,256]{1,0} all-gather(%v), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"
    line = {"often": often, "sends": sends}[name]
    branches = f"""
%costly (v: f32[1024,256]) -> f32[1024,256] {{
  {line}
  ROOT %same = f32[1024,256]{{1,0}} bitcast(%v)
}}

%cheap (v: f32[1024,256]) -> f32[1024,256] {{
  %few = f32[1024,256]{{1,0}} sine(%v)
  ROOT %more = f32[1024,256]{{1,0}} sine(%few)
}}

ENTRY"""
    choice = "%choice = f32[1024,256]{1,0} conditional(%n, %y, %y), branch_computations={%cheap, %costly}\n"
    text = TEXT.replace("\nENTRY", branches).replace("  %thrice", f"  {choice}  %thrice")
    (found,) = (one for one in schedule(text) if one.name == "choice")
    assert [one.name for one in found.body] == [name]


THUNKS = """000: kCommandBuffer [source]
    001: kCustomKernel [source] negate
    002: kCustomKernel [source] sort
    003: kCustomKernel [source] sort
004: kCustomCall [source]
005: kWhile [source]
"""
NAMES = thunk_names({1: "counts", 2: "shared", 3: "shared", 4: "planned", 5: "rounds"})


def test_launches_are_counted_by_instruction():
    found = launches(THUNKS, NAMES)
    assert found.kernels == {"counts": 1, "shared": 2, "planned": 1, "rounds": 1}
    assert found.in_graphs == {"counts", "shared"}
    by_name = {one.name: one for one in schedule(launches=found)}
    assert (by_name["shared"].launches, by_name["shared"].in_graph, by_name["planned"].in_graph) == (2, True, False)
    # The host reads the condition of a loop outside of graphs.
    assert by_name["rounds"].waits_for_host
    assert not any(one.waits_for_host for one in schedule(launches=Launches()))


def test_an_asynchronous_custom_call_keeps_its_stream():
    start = "(s32[16], s32[128]) async-start(%gathered), calls=%planner, "
    start += 'frontend_attributes={_xla_stream_annotation="2"}'
    text = TEXT.replace("ENTRY", PLANNER + "ENTRY").replace(
        '%planned = s32[128]{0} custom-call(%gathered), custom_call_target="moe_lb_plan_exact"',
        f"%planned.start = {start}\n  %planned = s32[128]{{0}} async-done(%planned.start)",
    )
    one = next(one for one in schedule(text) if one.name == "planned.start")
    assert (one.kind, one.runs_beside, one.stream) == (Kind.PLANNER, True, "2")


PLANNER = """%planner (g: s32[128]) -> s32[128] {
  ROOT %plan = s32[128]{0} custom-call(%g), custom_call_target="moe_lb_plan_exact"
}

"""


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("jit(loss)/jvp()/shard_map/dispatch/gather", "dispatch"),
        ("transpose(jvp(route))/dot_general", "backward/route"),
        ("shard_map/backward/further_rounds/while/body/experts/mul", "backward/experts"),
        ("shard_map/planned/dispatched", "other"),
        ("", "other"),
    ],
)
def test_stages_are_the_innermost_scopes(name, stage):
    assert stage_of(name) == stage


def test_a_schedule_is_json():
    text = json.dumps([asdict(one) for one in schedule()])
    assert json.loads(text)[0]["name"] == "counts"


OWN_CALLS = """
ENTRY %main (w: bf16[2,256,128], p: s32[8,3], x: bf16[640,256]) -> s32[2] {
  %post = (s32[2]{0}, bf16[1,256,128]{2,1,0}) custom-call(%p, %w), custom_call_target="moe_lb_copy_post", metadata={op_name="f/plan/ffi_call"}
  %slots = bf16[1,256,128]{2,1,0} get-tuple-element(%post), index=1
  %both = (s32[8,3]{1,0}, s32[2]{0}) custom-call(%p, %w, %slots, %x), custom_call_target="moe_lb_plan_feplb_and_copy", metadata={op_name="f/plan/ffi_call"}
  %rows = (s32[2]{0}, bf16[640,256]{1,0}) custom-call(%p, %x, %x), custom_call_target="moe_lb_copy_rows", backend_config={num_kinds = 1 : i64}, metadata={op_name="f/rows_onward/dispatch/ffi_call"}
  %sum = bf16[2,256,128]{2,1,0} custom-call(%p, %w), custom_call_target="moe_lb_copy_sum", metadata={op_name="f/backward/replicate/ffi_call"}
  ROOT %joined = s32[2]{0} custom-call(%p), custom_call_target="moe_lb_copy_join", metadata={op_name="f/replicate/ffi_call"}
}
"""  # noqa: E501 (XLA's lines)


def test_planners_and_copies_of_this_package():
    found = schedule(OWN_CALLS)
    assert [(one.name, one.kind, one.stage, one.wave, one.runs_beside) for one in found] == [
        # The planner runs beside the compute stream, which waits before the copies.
        ("post", Kind.PLANNER, "plan", "", True),
        ("both", Kind.JOIN, "plan", "", False),
        ("both", Kind.COPIES, "plan", "", True),
        ("rows", Kind.COPIES, "dispatch", "rows_onward", True),
        ("sum", Kind.COPIES, "backward/replicate", "", False),
        ("joined", Kind.JOIN, "replicate", "", False),
    ]
    copies = [one for one in found if one.kind is Kind.COPIES]
    # The host made the tables of a planned copy; it reads the others from the device.
    assert [one.waits_for_host for one in copies] == [False, True, True]
    shapes = [one.exchange for one in copies]
    weights, rows = 2 * 256 * 128 * 2, 640 * 256 * 2
    assert [(shape.operand_rows, shape.nbytes) for shape in shapes] == [(2, weights), (640, rows), (2, weights)]


DOTS = """
ENTRY %main (x: f32[64,32], w: f32[32,16]) -> f32[64,16] {
  %exact = f32[64,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, operand_precision={highest,highest}
  ROOT %terms = f32[64,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, algorithm=dot_bf16_bf16_f32_x6
}
"""  # noqa: E501 (XLA's lines)


def test_a_product_by_terms_of_bfloat16_has_its_passes():
    forms = {one.name: (one.product.kind, one.product.dtype, one.product.passes) for one in schedule(DOTS)}
    assert forms == {"exact": ("dense", "f32", 1), "terms": ("dense", "bf16", 6)}
