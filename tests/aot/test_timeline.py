"""Times of a schedule follow its streams, its dependencies and the load."""

import re
from dataclasses import replace

import numpy as np
import pytest

from jax_moe_lb import Buffers, Topology, exact
from jax_moe_lb.aot import LayerLoad, LayerSizes, Target, counts_of
from jax_moe_lb.aot.execution_counts import Launches
from jax_moe_lb.aot.flops import ProductForm
from jax_moe_lb.aot.operation_time import TIME_UNDER_LIMITS, OperationTime
from jax_moe_lb.aot.schedule import PEER_COPIES, ExchangeShape, Kind, Loop, ScheduledOperation
from jax_moe_lb.aot.timeline import COMPUTE, ENGINES, EXCHANGES, timeline
from jax_moe_lb.collectives.exchange_paths import ExchangePath
from jax_moe_lb.collectives.exchange_time import Machine, exchange_time
from jax_moe_lb.core.device_rates import device_rates, recorded_tflops
from jax_moe_lb.transport import Forward, Once
from tests.aot.scheduled import TEXT, even_counts, load_of, schedule, skewed_counts

TARGET = Target.parse("h100:1x8")
RATES = device_rates("h100", "cuda")
EVEN = load_of(even_counts())
ALL = schedule()
ONE = {one.name: one for one in ALL}


def spans(found, name):
    return [span for span in found.spans if span.name == name]


def test_a_planner_beyond_the_measured_ranks_takes_time_in_proportion():
    estimator = OperationTime(TARGET)
    changes = ({"planned_ranks": 64}, {"planned_ranks": 128}, {"planned_ranks": 64, "under_limits": True})
    few, many, limited = (
        estimator.of(replace(ONE["planned"], **change), 0).seconds - RATES.start for change in changes
    )
    assert few == pytest.approx(RATES.planner_kernel[64])
    assert many == pytest.approx(2 * few)
    assert limited == pytest.approx(TIME_UNDER_LIMITS * few)


def test_an_exchange_beside_work_is_hidden():
    # In the second one, the work beside the exchange takes longer.
    large = schedule(TEXT.replace("[1024,256]", "[1048576,256]"))
    small, large = (timeline(one, TARGET, EVEN) for one in (ALL, large))
    (start,), (shared,) = spans(small, "start"), spans(small, "shared")
    (wait,) = spans(small, "wait for start")
    assert (start.stream, shared.stream, wait.stream) == (EXCHANGES, COMPUTE, COMPUTE)
    assert start.start_s == shared.start_s
    # The stream waits for the rest of the exchange only.
    assert wait.seconds == pytest.approx(start.seconds - shared.seconds)
    assert (wait.stage, wait.kind) == ("dispatch", Kind.EXCHANGE)
    assert not spans(large, "wait for start")
    assert large.exposed_s == pytest.approx(small.exposed_s - wait.seconds)
    assert large.hidden_s == pytest.approx(small.hidden_s + wait.seconds)


def test_a_wait_for_a_planner_leaves_an_exchange_hidden():
    planner = replace(ONE["planned"], runs_beside=True)
    join = ScheduledOperation("joined", Kind.JOIN, "plan", stream=Kind.PLANNER.value)
    work = replace(ONE["shared"], nbytes=10**9)
    alone, beside = (timeline((ONE["start"], *first, work), TARGET, EVEN) for first in ((), (planner, join)))
    assert spans(beside, "wait for planned")
    assert beside.hidden_s == pytest.approx(alone.hidden_s)
    assert alone.hidden_s > 0


def test_the_compute_stream_is_gapless_and_stages_share_the_total():
    found = timeline(ALL, TARGET, EVEN)
    moment = 0.0
    for span in found.compute:
        assert span.start_s == pytest.approx(moment)
        moment = span.end_s
    assert found.total_s == pytest.approx(moment)
    assert sum(found.stages().values()) == pytest.approx(found.total_s)
    assert sum(found.bounds().values()) == pytest.approx(found.total_s)


def test_exchanges_run_one_at_a_time():
    found = timeline((ONE["start"], ONE["back"]), TARGET, EVEN)
    first, wait, second = found.spans
    assert (wait.name, wait.stage, second.start_s) == ("wait for start", "dispatch", first.end_s)


def test_a_loop_takes_as_long_as_its_iterations():
    loop = ONE["thrice"]
    thrice, once = (timeline((replace(loop, trips=trips),), TARGET) for trips in (3, 1))
    assert thrice.total_s == pytest.approx(3 * once.total_s)
    assert [span.times for span in thrice.spans] == [3]
    assert timeline((replace(loop, trips=0),), TARGET).spans == ()


def test_an_exchange_beside_a_loop_takes_its_time_once():
    found = timeline((ONE["start"], replace(ONE["thrice"], trips=2), ONE["back"]), TARGET, EVEN)
    (first,), (second,) = spans(found, "start"), spans(found, "back")
    assert first.seconds > sum(span.seconds for span in found.spans if span.times == 2) > 0
    assert second.start_s == pytest.approx(first.end_s)


def test_overflow_rounds_follow_from_the_load():
    """A loop around the rounds has one step: it converts sums of gradients to float32 before further rounds."""
    skewed = load_of(skewed_counts())
    assert (EVEN.rounds, skewed.rounds) == (1, 7)
    for load in (EVEN, skewed):
        found = timeline(ALL, TARGET, load)
        around = timeline((replace(ONE["rounds"], name="around", body=(ONE["rounds"],)),), TARGET, load)
        assert len(spans(found, "again")) == len(spans(around, "again")) == load.rounds - 1 == found.rounds - 1
    # The last round has what is left of 4096 rows.
    assert [skewed.sent(0, i).sum() for i in range(7)] == 6 * [640] + [256]


def test_an_exchange_between_nodes_alone_takes_their_network():
    shape = ExchangeShape("all-to-all", ("node",), 2, 2**30, 2**30, 1, 0, "")
    found = OperationTime(Target.parse("h100:2x8"))._exchange(ONE["gathered"], shape, 0)
    wait = RATES.collective + RATES.network_latency
    assert found.seconds == pytest.approx(wait + 2**29 / (RATES.network * RATES.network_share))


def test_gradients_of_empty_slots_are_not_written():
    """On the rank with the most replicas; libraries clear all groups."""
    load = EVEN
    placement = np.hstack([load.plan.placement, np.full((8, 2), -1, np.int32)])
    placement[3, 2] = 0
    estimator = OperationTime(TARGET, replace(load, plan=replace(load.plan, placement=placement)))
    form = ProductForm("outer", "triton", "bf16", 640, 128, groups=4)
    assert estimator._written(form) == estimator._written(replace(form, kernel="pallas")) == 3 / 4
    assert estimator._written(replace(form, groups=2)) == 1 / 2  # of replicas alone
    assert estimator._written(replace(form, groups=3)) == 1.0  # home experts of another layer
    assert estimator._written(replace(form, kernel="library")) == 1.0
    assert estimator._written(replace(form, kind="product")) == 1.0


def test_a_product_takes_the_rows_that_it_serves():
    product = replace(ONE["hidden"], flops=10**12)
    full, served = (OperationTime(TARGET, load).of(product, 0) for load in (None, EVEN))
    assert (full.bound, served.bound) == ("FLOPs", "FLOPs")
    assert full.seconds - RATES.launch < 1 / recorded_tflops("9.0", "product", "Mosaic") <= full.seconds
    # 512 of the 640 rows of the buffer, in whole tiles.
    assert (served.seconds - RATES.start) / (full.seconds - RATES.start) == pytest.approx(512 / 640)


@pytest.mark.parametrize(("kernel", "kind"), [("mosaic", "transposed"), ("triton", "product"), ("own", "transposed")])
def test_kernels_have_their_own_rates(kernel, kind):
    product = ONE["hidden"]
    form = replace(product.product, kernel=kernel, kind=kind, rows=128, groups=1)
    found = OperationTime(TARGET).of(replace(product, flops=10**12, product=form), 0)
    recorded = {"mosaic": "Mosaic", "triton": "Triton", "own": None}[kernel]
    rate = recorded_tflops("9.0", kind, recorded)
    assert (rate is None) == (kernel == "own")
    # The curve of the default kernels goes down to 241 rows of a group; this one has fewer.
    share = min(RATES.experts.values()) / RATES.experts_speed if kernel == "triton" else 1.0
    speed = share * (1e12 * rate if rate else RATES.grouped[kind])
    assert found.seconds == pytest.approx(10**12 / speed + RATES.start)


def test_small_operations_cost_their_launch():
    one, time = ONE["counts"], OperationTime(TARGET)
    assert time.of(one, 0).seconds == RATES.launch
    assert time.of(replace(one, in_graph=True), 0).seconds == pytest.approx(RATES.start, rel=0.01)
    assert time.of(replace(one, in_graph=True, launches=10), 0).seconds == pytest.approx(10 * RATES.start, rel=0.01)
    assert time.of(one, 0).bound == "launch"


def test_the_path_decides_the_time_of_an_exchange():
    paths = ExchangePath.ONE_SHOT, ExchangePath.SEND_RECEIVE
    one_shot, sends = (spans(timeline(schedule(path=path), TARGET, EVEN), "back")[0].seconds for path in paths)
    # Two updates for each of 7 peers, and a wait of the host.
    assert sends > 14 * RATES.nccl_update + RATES.host_wait > one_shot


@pytest.mark.parametrize("rows", [2, 7], ids=["home experts", "replicas by rank"])
def test_weights_of_replicas_count_in_every_form(rows):
    """Two home experts and one replica slot a rank: all home experts are operand, or all replicas that may be sent."""
    sizes = LayerSizes(experts=16, tokens=256, per_token=2)
    load = LayerLoad.of(exact(1), sizes, Topology.flat(8), counts_of("zipf:1.2", sizes, 8))
    nbytes, path = 10**9, ExchangePath.ONE_SHOT.value
    shape = ExchangeShape("ragged-all-to-all", ("expert",), 8, rows * nbytes, nbytes, rows, 1, path)
    found = OperationTime(TARGET, load).of(ScheduledOperation("weights", Kind.EXCHANGE, "replicate", exchange=shape), 0)
    expected = exchange_time(nbytes * load.replicas, ExchangePath.ONE_SHOT, nbytes, rows, Machine(RATES, 8))
    assert found.seconds == expected.seconds > 0.001


def test_a_chunk_has_its_part_of_the_rows():
    load, time, whole = EVEN, OperationTime(TARGET, EVEN), ONE["back"]
    shape = whole.exchange
    half = replace(shape, nbytes=shape.nbytes // 2, operand_rows=shape.operand_rows // 2)
    np.testing.assert_array_equal(time._sent(replace(whole, exchange=half), half, 0), time._sent(whole, shape, 0) / 2)
    assert time._sent(whole, shape, 0).sum() == 8 * load.copies * 512
    there = replace(shape, nbytes=shape.result_bytes, result_bytes=shape.nbytes // 2)
    sent = time._sent(replace(whole, stage="dispatch"), there, 0)
    assert sent.sum() == 8 * load.copies * 512 / 2


def test_the_host_waits_for_conditions_outside_of_graphs():
    load = load_of(skewed_counts())
    waiting = timeline(schedule(launches=Launches({"rounds": 1})), TARGET, load)
    # Before each of 6 rounds, and at the end.
    assert sum(span.bound == "host" and span.kind is Kind.LOOP for span in waiting.spans) == 7
    assert not any(span.kind is Kind.LOOP for span in timeline(ALL, TARGET, load).spans)


@pytest.mark.parametrize(("loop", "times"), [(Loop.COUNTED, 3 + 1), (Loop.BRANCH, 1)])
def test_the_host_waits_before_every_iteration_and_at_the_end(loop, times):
    waiting = replace(ONE["thrice"], loop=loop, waits_for_host=True)
    (wait,) = (span for span in timeline((waiting,), TARGET).spans if span.bound == "host")
    assert (wait.times, wait.seconds) == (times, pytest.approx(times * RATES.host_wait))


@pytest.mark.parametrize(("ranks", "seconds"), [(4, 22.72e-6), (8, 22.72e-6), (20, 48.315e-6), (64, 149.7e-6)])
def test_a_planner_in_a_kernel_needs_no_host(ranks, seconds):
    options = f"backend_config={{domain = {ranks} : i64, eps = 1.0e-2 : f64}}"
    kernel = schedule(TEXT.replace('moe_lb_plan_exact"', f'moe_lb_plan_exact_kernel", {options}'))
    found, on_host = (spans(timeline(one, TARGET, EVEN), "planned")[0] for one in (kernel, ALL))
    assert (found.bound, on_host.bound) == ("latency", "host")
    assert (found.seconds, on_host.seconds) == (pytest.approx(RATES.start + seconds), pytest.approx(RATES.planner))


def test_a_search_for_a_missed_mean_depends_on_the_load():
    text = TEXT.replace(', backend_config={"known_trip_count":{"n":"3"}}', "")
    text = text.replace("jit(f)/transpose(jvp(route))/while", "jit(f)/plan/missed_mean/while")
    (loop,) = (one for one in schedule(text) if one.name == "thrice")
    assert loop.loop is Loop.SEARCH
    found = [timeline((loop,), TARGET, load).spans for load in (EVEN, load_of(skewed_counts()), None)]
    assert [[span.name for span in one] for one in found] == [[], ["sine"], ["sine"]]


def exchange(stage, axes, ranks, operand, result=1):
    """Return an exchange of lists with 64 updates for each peer, from shapes of operand and result."""
    (sent, width), path = operand, ExchangePath.ONE_SHOT.value
    shape = ExchangeShape("ragged-all-to-all", axes, ranks, sent * width, result * width, sent, 64, path)
    return ScheduledOperation("rows", Kind.EXCHANGE, stage, exchange=shape)


LISTS = LayerSizes(hidden=256, inner=128, experts=32, tokens=512, per_token=4)


def test_lists_carry_tokens_instead_of_copies():
    topology = Topology.flat(8)
    counts = counts_of("zipf:1.2", LISTS, 8)
    load = LayerLoad.of(replace(exact(1), dispatch=Once()), LISTS, topology, counts)
    copies = LayerLoad.of(exact(1), LISTS, topology, counts)
    rows = load.lists.hops[0].rows[0]
    assert rows.sum() < 0.95 * copies.waves[0].sum() == 0.95 * 8 * 512 * 4
    assert load.rounds == copies.rounds == 1
    arrays = Once().cost().row_arrays(512, 4, topology)
    there, back = (arrays.sent, rows), (arrays.received, rows.T)
    for stage, (operand, sent) in {"dispatch": there, "backward/dispatch": there, "combine": back}.items():
        one = exchange(stage, ("expert",), 8, (operand, 512))
        padded = np.pad(512 * sent[..., None], ((0, 0), (0, 0), (0, 63)))
        expected = exchange_time(padded, ExchangePath.ONE_SHOT, 512, operand, Machine(RATES, 8))
        assert OperationTime(TARGET, load).of(one, 0) == expected


def test_hops_of_lists_take_the_slowest_group_and_a_part_per_chunk():
    target, sizes = Target.parse("h100:2x8"), replace(LISTS, tokens=510)
    topology = replace(target.topology(), ranks_per_domain=8)
    counts = counts_of("zipf:1.2", sizes, 16)
    dispatches = (Forward(Buffers(4.0, chunks=chunks)) for chunks in (1, 4))
    loads = [LayerLoad.of(replace(exact(1), dispatch=one), sizes, topology, counts) for one in dispatches]
    between, inside = loads[0].lists.hops
    assert (between.rows.shape, inside.rows.shape) == ((8, 2, 2), (2, 8, 8))
    # Each token visits a node at most once, and a rail rank forwards tokens of both nodes.
    assert between.rows.sum((1, 2)).max() <= 2 * 2 * 510
    assert inside.rows.sum() > between.rows.sum()
    # Four chunks of at most 128 tokens.
    assert [hop.sent for hop in loads[1].lists.hops] == [2 * 128, min(inside.received, 2 * 128 * 4)]
    whole, part = (OperationTime(target, load) for load in loads)
    for axes, ranks, hop in ((("node",), 2, 0), (("expert",), 8, 1)):
        out, quarter = (exchange("dispatch", axes, ranks, (load.lists.hops[hop].sent, 512)) for load in loads)
        pairs = (whole, out), (part, quarter)
        bytes_of, quarters = (np.stack(time._in_groups(one, one.exchange, 0)) for time, one in pairs)
        np.testing.assert_array_equal(quarters, 512 * -(-bytes_of // (4 * 512)))
        on = whole._group(out.exchange)
        times = [exchange_time(one, ExchangePath.ONE_SHOT, 512, out.exchange.operand_rows, on) for one in bytes_of]
        assert np.ptp(bytes_of.sum((1, 2, 3))) > 0
        assert whole.of(out, 0).seconds == max(one.seconds for one in times)
    # Slots and weights of all chunks take one exchange.
    tail = exchange("dispatch", ("expert",), 8, (inside.sent, 2 * 4 * 4))
    for time in (whole, part):
        assert np.stack(time._in_groups(tail, tail.exchange, 0)).sum() == 32 * inside.rows.sum()


def test_chunks_of_one_hop_have_a_part_of_the_rows_in_the_forward_pass_alone():
    topology, counts = Topology.flat(8), counts_of("zipf:1.2", LISTS, 8)
    load = LayerLoad.of(replace(exact(1), dispatch=Once(Buffers(chunks=2))), LISTS, topology, counts)
    (hop,), time = load.lists.hops, OperationTime(TARGET, load)

    def sent(stage, rows, width):
        one = exchange(stage, ("expert",), 8, (rows, width))
        return np.stack(time._in_groups(one, one.exchange, 0)).sum((0, 3))

    assert hop.chunk_sent < hop.sent
    assert hop.chunk_received < hop.received
    # A row of slots and weights has 32 bytes; both have chunks, too.
    for stage, width, of_round, of_chunk, rows in (
        ("dispatch", 512, hop.sent, hop.chunk_sent, hop.rows[0]),
        ("dispatch", 32, hop.sent, hop.chunk_sent, hop.rows[0]),
        ("combine", 512, hop.received, hop.chunk_received, hop.rows[0].T),
    ):
        np.testing.assert_array_equal(sent(stage, of_round, width), width * rows)
        np.testing.assert_array_equal(sent(stage, of_chunk, width), width * -(-rows // 2))


def test_rounds_of_lists_have_even_parts():
    topology, counts = Topology.flat(8), counts_of("zipf:1.2", LISTS, 8)
    load = LayerLoad.of(replace(exact(1), dispatch=Once(Buffers(headroom=0.4))), LISTS, topology, counts)
    assert load.rounds == 3
    assert sum(load.sent(0, i) for i in range(3)).tolist() == load.waves[0].tolist()
    operand = Once(Buffers(headroom=0.4)).cost().row_arrays(512, 4, topology).sent
    one = exchange("dispatch", ("expert",), 8, (operand, 512))
    time = OperationTime(TARGET, load)
    rounds = [time._in_groups(one, one.exchange, i)[0] for i in range(3)]
    assert sum(sent.sum() for sent in rounds) == 512 * load.lists.hops[0].rows.sum()
    assert max(sent.sum() for sent in rounds) < 1.1 * min(sent.sum() for sent in rounds)


@pytest.mark.parametrize(("waits", "fixed_s"), [(True, RATES.host_wait), (False, RATES.start)])
def test_peer_copies_run_on_copy_engines_until_they_are_joined(waits, fixed_s):
    def found(nbytes):
        shape = ExchangeShape(PEER_COPIES, None, 1, nbytes, nbytes, 2, 0, "")
        copies = ScheduledOperation(
            "copies", Kind.COPIES, "replicate", exchange=shape, runs_beside=True, waits_for_host=waits
        )
        return timeline((copies, ONE["hidden"], ScheduledOperation("join", Kind.JOIN, "replicate")), TARGET)

    large, small = found(10**9), found(0)
    assert [span.stream for span in large.spans] == [ENGINES, COMPUTE, COMPUTE]
    assert large.total_s == pytest.approx(fixed_s + 10**9 / RATES.copy_engines)
    assert large.exposed_s == pytest.approx(large.total_s - large.spans[1].seconds)
    # Copies without bytes still wait for the host, which reads that there are none.
    assert small.spans[0].seconds == pytest.approx(fixed_s)
    assert (large.spans[0].bound, small.spans[0].bound) == ("link", "host" if waits else "link")


def test_devices_without_rates_are_refused():
    with pytest.raises(ValueError, match=r"^device is 'v4'; expected one with rates: a100, b200, "):
        timeline(ALL, Target.parse("v4:2x2x2"))


def test_a_tpu_program_without_its_exchanges_is_refused():
    """The compiler of tpu7x replaces them by operations that would count as none."""
    known = tuple(one for one in ALL if one.kind not in (Kind.EXCHANGE, Kind.LOOP))
    with pytest.raises(ValueError, match="target is tpu7x:2x2x1; expected one whose compiler keeps ragged exchanges"):
        timeline(known, Target.parse("tpu7x:2x2x1"), EVEN)
    assert timeline(known, TARGET, EVEN).total_s > 0


GPUS = ["h100:1x8", "h200:1x8", "b200:1x8", "gb200:1x2x4", "a100:1x8"]


@pytest.mark.parametrize("target", [*GPUS, "v5e:2x4", "v6e:2x4"])
def test_targets_have_a_price(target):
    path = ExchangePath.NATIVE if target.startswith("v") else ExchangePath.ONE_SHOT
    found = timeline(schedule(path=path), Target.parse(target), EVEN)
    assert 0 < found.exposed_s < found.total_s < 1e-2


@pytest.mark.parametrize(("kernel", "rate"), [("moe_gather_rows", "gathered_row"), ("moe_sum_rows", "summed_row")])
def test_kernels_of_tpus_take_a_time_for_each_row(kernel, rate):
    """Instructions of the kernel bound it, unless the rows are wide."""
    text = TEXT.replace("%w, %n), custom_call", "%w, %gathered), custom_call").replace("%hidden =", f"%{kernel}.1 =")
    (one,) = (each for each in schedule(text.replace("(%hidden,", f"(%{kernel}.1,")) if each.name == f"{kernel}.1")
    assert one.items == 128
    target = Target.parse("v5e:2x4")
    time = OperationTime(target)
    wide, narrow = (time.of(replace(one, product=None, flops=0, nbytes=nbytes), 0) for nbytes in (10**9, 128))
    many = replace(one, product=None, flops=0, nbytes=128, items=10**6)
    rates = device_rates("v5e", "tpu")
    assert time.of(many, 0).seconds == pytest.approx(10**6 * getattr(rates, rate) * rates.cycle, rel=1e-2)
    assert (time.of(many, 0).bound, wide.bound) == ("rows", "HBM")
    assert wide.seconds > narrow.seconds
    assert not any(each.items for each in ALL)


def test_products_of_tpus_compute_whole_tiles_of_rows_and_columns():
    """Tiles of rows begin at multiples of their size, so each group of a shared tile computes it."""
    time, product = OperationTime(Target.parse("v5e:2x4"), EVEN), replace(ONE["hidden"], flops=10**12)
    form = product.product
    rows = EVEN.rows(0)
    ends = np.cumsum(rows, 1)
    tiles = np.where(rows > 0, -(-ends // 128) - (ends - rows) // 128, 0)
    assert time._served(product, form, 0) == 128 * tiles.sum(1).max() >= rows.sum(1).max()
    once, padded = (time.of(replace(product, product=replace(form, padding=by)), 0).seconds for by in (1.0, 1.5))
    start = device_rates("v5e", "tpu").start
    assert (padded - start) / (once - start) == pytest.approx(1.5)


def test_a_planner_kernel_takes_a_time_for_each_vector_of_a_step():
    """One step per replica, in two domains of 64 ranks with 2 slots and 4 home experts."""
    results = "(s32[2,2,64,128]{3,2,1,0}, s32[2,2,64,128]{3,2,1,0}, s32[2,4,64,128]{3,2,1,0}, s32[2,64,128]{2,1,0})"
    text = re.sub(r"%hidden = \S+", f"%moe_exact_fill.1 = {results}", TEXT)
    (one,) = (each for each in schedule(text.replace("(%hidden,", "(%moe_exact_fill.1,")) if "fill" in each.name)
    assert one.items == 2 * (2 * 64) * ((2 + 4 + 2) * (64 // 8) + 40)
    one, target = replace(one, product=None, flops=0, nbytes=0), Target.parse("v6e:8x8")
    rates = device_rates("v6e", "tpu")
    everywhere, home = OperationTime(target).of(one, 0), OperationTime(target, EVEN).of(one, 0)
    assert everywhere.seconds - rates.start == pytest.approx(one.items * rates.planned_vector * rates.cycle)
    assert everywhere.bound == "latency"
    assert home.seconds < everywhere.seconds / 10
