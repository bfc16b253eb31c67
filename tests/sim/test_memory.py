"""Memory is modelled part by part, as in compiled programs."""

from dataclasses import replace

import pytest

from jax_moe_lb import Buffers, exact, plain
from jax_moe_lb.sim import Cluster, Links, Migration, ModelShape, Step
from jax_moe_lb.sim.memory import ADDRESS_BYTES, Memory, memory_of
from jax_moe_lb.transport import Codec, Direct, Forward, Once

CLUSTER = Cluster((Links("node", 2, 1e9), Links("gpu", 8, 1e11)))
MODEL = ModelShape(layers=4, hidden=1024, inner=512, experts=64, per_token=4, tokens=1024, gradient_itemsize=2)
COPIES = MODEL.tokens * MODEL.per_token
SLOTS = 4 + 2


def held(system=exact(2), model=MODEL, cluster=CLUSTER, migration=Migration(), step=Step()):
    return memory_of(system, model, cluster, migration, step)


def test_a_codec_without_gathers_holds_no_experts():
    assert held(migration=Migration(codec=Codec(4.0))) == held()


def test_a_loop_over_rounds_carries_its_sums_in_float32():
    loop, once = held(), held(exact(2, Buffers(max_rounds=1)))
    parameters = SLOTS * MODEL.expert_bytes / 2
    # The three kinds of matrices are added one after the other.
    assert loop.sums == 4 * parameters * 4 / 3
    assert once.sums == 2 * parameters


def test_many_rows_need_most_where_gradients_of_rows_are():
    many = replace(MODEL, tokens=65536, inner=128)
    rows = plain().dispatch.cost().buffer_rows(many.tokens * many.per_token)
    found = held(plain(), many)
    # Rows and two products of that width, the gradients of two hidden activations, and the carried outputs.
    arrays = 3 * rows * many.row_bytes + 2 * rows * many.inner * 2 + many.tokens * many.per_token * many.row_bytes
    assert found.buffers == arrays + 2 * many.tokens * many.row_bytes
    # The gradient of `down` is complete, and added to the carried sums of all kinds.
    assert found.sums == pytest.approx(4 * 4 * many.expert_bytes / 2 * 4 / 3)


def test_dispatches_of_tokens_take_other_buffers():
    """`Once` gathers copies from received rows, and `Forward` keeps the tokens of its offset in all nodes."""
    model = replace(MODEL, tokens=65536, inner=128)
    sizes = model.tokens, model.per_token, CLUSTER.topology()
    arrays = {kind: kind().cost().row_arrays(*sizes) for kind in (Direct, Once, Forward)}
    copies, both = model.tokens * model.per_token, 2 * model.tokens
    room = Once().buffers.rows(copies)
    assert arrays[Direct] == (copies, 0, room, copies, False, 0, 0)
    assert arrays[Once] == (copies, room + 128, room + 128, model.tokens, True, 0, 0)
    assert arrays[Forward] == (room + 128, room + 128, room + 128, both, True, both, both)
    found = {kind: held(replace(plain(Buffers(max_rounds=1)), dispatch=kind(Buffers(max_rounds=1)))) for kind in arrays}
    assert found[Direct].buffers < found[Once].buffers < found[Forward].buffers
    # One round of `Forward` also stores tokens and gradients of outputs of both nodes.
    both = {kind: memory_of(replace(plain(), dispatch=kind()), model, CLUSTER, Migration(), Step()) for kind in arrays}
    forwarded = 2 * 2 * model.tokens * model.row_bytes + 2 * model.tokens * model.row_bytes * 2
    carried = model.tokens * model.row_bytes * 2
    assert both[Forward].buffers - both[Once].buffers == forwarded - carried


def test_layers_keep_tokens_and_addresses_or_all_that_they_computed():
    own, papers = held().kept, held(step=Step(recompute=False)).kept
    assert own == 4 * (MODEL.tokens * MODEL.row_bytes + COPIES * ADDRESS_BYTES)
    assert papers == 4 * COPIES * (MODEL.row_bytes + 2 * 512 * 2 + ADDRESS_BYTES)


def test_gradients_of_replicas_need_room_where_experts_are_large():
    wide = replace(MODEL, inner=65536, tokens=128)
    home = held(model=wide)
    # All replicas that may arrive from the seven others of a domain, and one of their sums in float32.
    assert home.arriving == (7 * 2 + 2) * wide.expert_bytes
    assert home.in_use == 0
    assert held(plain(), wide).arriving == 0
    assert held(exact(2), wide, step=Step(backward=False)).arriving == 0


def test_products_take_one_array_of_all_slots_except_on_gpus():
    joins = replace(CLUSTER, joins_weights=True)
    forward, backward = held(cluster=joins, step=Step(backward=False)), held(cluster=joins)
    kind = SLOTS * MODEL.expert_bytes / 3
    out_of_the_stack = 4 * MODEL.expert_bytes
    assert forward.in_use == kind + out_of_the_stack
    assert backward.in_use == 2 * kind + out_of_the_stack
    assert held(plain(), replace(MODEL, layers=1)).in_use == 0
    assert held().in_use == out_of_the_stack


@pytest.mark.parametrize("backward", [True, False])
def test_buffers_grow_with_tokens_and_headroom(backward):
    step, roomy = Step(backward=backward), plain(Buffers(headroom=2.0))
    few, many = held(plain(), step=step), held(plain(), replace(MODEL, tokens=4096), step=step)
    # Up to a tile of 128 rows.
    assert many.buffers == pytest.approx(4 * few.buffers, rel=0.02)
    assert held(roomy, step=step).buffers > few.buffers


def test_gathered_experts_are_served_like_those_at_home():
    few = replace(MODEL, tokens=64)
    gathered = held(plain(), few, migration=Migration((1, 2)))
    assert gathered.sums == 2 * held(plain(), few).sums
    # A rank that has gathered all experts has no replicas.
    assert held(migration=Migration((2, 8))).replicas == 0


def test_residuals_of_encoded_gradients_take_memory_for_the_experts_of_every_level():
    ways = [Migration((2, 4), Codec(gradient_ratio=ratio)) for ratio in (1.0, 10.0)]
    whole, encoded = (held(plain(), migration=way).gathered for way in ways)
    # Two ranks' experts at the outer level and eight at the inner one, four each, in float32.
    assert encoded - whole == MODEL.layers * (2 + 8) * 4 * 2 * MODEL.expert_bytes
    assert held(plain(), migration=ways[1], step=Step(backward=False)).gathered < whole


def test_memory_says_its_parts_by_name():
    assert Memory(weights=2e9, in_use=1e9).words == "weights 2.0, weights in use 1.0"
    assert (Memory(weights=1.0) + Memory(weights=2.0, sums=3.0)).total == 6
