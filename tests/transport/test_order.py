"""Order of the exchanges and products of a round, chunks of rounds, and arrays saved for the backward pass."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jax_moe_lb import Buffers, Topology, exact, feplb, rails
from jax_moe_lb.core.schedule import in_order, in_order_on_cuda, in_order_on_tpu
from jax_moe_lb.kernels import grouped_ffn
from jax_moe_lb.kernels.operands import BackwardRows, RowGroups
from jax_moe_lb.layer import CHECKPOINT_NAMES
from jax_moe_lb.transport import Direct, MultiRailDispatch, QuantizedTransfer, Saved, TwoPhase, one_round, slot_weights
from jax_moe_lb.transport.exchange import Exchange, Receipt
from jax_moe_lb.transport.one_round import Batch, Kept, Round, gradient_round, serve_round
from tests.kernels.test_grouped_ffn import case as rows_of_groups
from tests.layer_cases import Case, assert_close, make_mesh, sharded_moe, with_gradients
from tests.marks import parametrize


def barrier(first, then):
    return jax.lax.optimization_barrier((first, then))


class Graph:
    """Dependencies between the outermost equations of a traced function."""

    def __init__(self, function, *args):
        self.jaxpr = jax.make_jaxpr(function)(*args).jaxpr
        self.source = {id(var): eqn for eqn in self.jaxpr.eqns for var in eqn.outvars}

    def before(self, var):
        """Return the equations that run before a value exists, by identity."""
        found, waiting = {}, [var]
        while waiting:
            eqn = self.source.get(id(waiting.pop()))
            if eqn is not None and id(eqn) not in found:
                found[id(eqn)] = eqn
                waiting += eqn.invars
        return found

    def names_before(self, name):
        """Return the checkpoint names before the equation of a name."""
        (eqn,) = (eqn for eqn in self.jaxpr.eqns if eqn.params.get("name") == name)
        every = {} if not eqn.invars else self.before(eqn.invars[0])
        return {one.params["name"] for one in every.values() if one.primitive.name == "name"}


def order(monkeypatch, module):
    """Order the operations of a module on CPUs, too."""
    for name in ("in_order", "in_order_on_cuda"):
        monkeypatch.setattr(module, name, barrier)


@pytest.mark.parametrize(
    ("ordered", "platforms"), [(in_order, ["cuda", "tpu"]), (in_order_on_cuda, ["cuda"]), (in_order_on_tpu, ["tpu"])]
)
def test_programs_of_these_platforms_have_the_barrier(ordered, platforms):
    traced = jax.jit(ordered).trace(jnp.zeros(3), jnp.ones(3))
    text = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cuda", "tpu", "cpu")}
    assert [name for name in text if "optimization_barrier" in text[name]] == platforms


def test_gradients_of_rows_come_between_gradients_of_weights(monkeypatch):
    """Gradients of `down` come first, then those of rows, which travel during the products for `up`."""
    order(monkeypatch, grouped_ffn)
    rows, experts, upstream = rows_of_groups(jnp.float32, fused=True)
    sizes, weights = jnp.full(8, 50, jnp.int32), jnp.ones((len(rows), 1))

    def gradients(rows, weights, up, down, upstream):
        of_rows, of_weights, of_experts = grouped_ffn._gradients_at_once(
            BackwardRows(rows, weights, upstream),
            type(experts)(up, down),
            RowGroups(sizes),
            None,
            sums_dtype=jnp.float32,
        )
        return of_rows, of_weights, of_experts.up, of_experts.down

    graph = Graph(gradients, rows, weights, experts.up, experts.down, upstream)
    of_rows, of_weights, up, down = graph.jaxpr.outvars
    assert id(graph.source[id(of_rows)]) in graph.before(up)
    assert id(graph.source[id(down)]) in graph.before(of_rows)
    assert not {id(graph.source[id(var)]) for var in (of_rows, up, down)} & set(graph.before(of_weights))


@dataclass(frozen=True)
class NamedExchange(Exchange):
    """An exchange between one rank and itself that names and numbers every transfer.

    In a backward round, `rows 1` are the gradients of the outputs.
    """

    takes_chunks = True
    counts: Counter = field(default_factory=Counter)

    def address(self, experts, counts, plan, topology):
        raise NotImplementedError

    def send(self, copies, receipt, i, topology):
        return self._named({1: "weights", 2: "rows"}[copies.shape[1]], copies), jnp.ones(1, jnp.int32)

    def send_back(self, rows, receipt, i, out, topology):
        return self._named({1: "weights back", 2: "rows back"}[rows.shape[1]], out + rows)

    def _named(self, kind, array):
        self.counts[kind] += 1
        return checkpoint_name(array, f"{kind} {self.counts[kind] - 1}")


def ones(width):
    return jnp.ones((4, width))


def named_round(chunks):
    order, zero = jnp.arange(4, dtype=jnp.int32), jnp.int32(0)
    receipt = Receipt(order=order, place=order, num_going=zero, rounds=zero, follows_plan=None)
    return Round(zero, receipt, NamedExchange(Buffers(chunks=chunks)), Topology.flat(1), ones(2))


def test_the_next_chunk_arrives_before_outputs_return(monkeypatch):
    order(monkeypatch, one_round)
    graph = Graph(
        lambda copies, out: serve_round(named_round(2), copies, lambda rows, _: (rows, ()), out)[0], ones(2), ones(2)
    )
    assert graph.names_before("rows 1") == set()
    assert graph.names_before("rows back 0") == {"rows 0", "rows 1"}


@dataclass(frozen=True)
class NamedProducts:
    """Backward functions of a round, of which the second computes gradients of rows and of weights."""

    of_rows: Callable
    counts: Counter = field(default_factory=Counter)

    def inner_products(self, rows, group_sizes):
        self.counts["products"] += 1
        return (checkpoint_name(rows, f"products {self.counts['products'] - 1}"),)

    def pull_back(self, batch, group_sizes, sums, exchange, of_chunks=None, *, is_last=True):
        return *self.of_rows(batch), None


def backward_graph(of_rows, saved=lambda array: Kept(), chunks=1):
    """Return the graph of a backward round, of which `saved` returns the arrays saved by the forward pass."""

    def backward(tokens, weights, upstream, of_copies, of_weights, array, replicas):
        carry, batch = ((of_copies, of_weights), None), Batch(tokens, weights, upstream)
        before = checkpoint_name(replicas, "replicas")
        return gradient_round(named_round(chunks), batch, NamedProducts(of_rows), carry, saved(array), before)[0]

    return Graph(backward, ones(2), ones(1), ones(2), ones(2), ones(1), ones(2), ones(1))


def test_exchanges_of_a_backward_round_have_an_order(monkeypatch):
    order(monkeypatch, one_round)

    def of_rows(batch):
        rows = checkpoint_name(batch.rows, "arrived") + batch.upstream
        return rows, batch.weights + batch.upstream[:, :1]

    graph = backward_graph(of_rows)
    assert graph.names_before("rows 0") == {"weights 0"}
    first = {"rows 0", "weights 0", "replicas"}
    assert graph.names_before("rows 1") == first
    assert graph.names_before("weights back 0") == first | {"rows 1"}
    assert graph.names_before("rows back 0") == first | {"rows 1", "arrived", "weights back 0"}
    # The rows themselves pass the barrier: products clear their tail in place, and the compiler copies an array that
    # another operation still reads.
    (arrived,) = (eqn for eqn in graph.jaxpr.eqns if eqn.params.get("name") == "arrived")
    assert graph.source[id(arrived.invars[0])].primitive.name == "optimization_barrier"


def test_the_next_chunk_of_a_backward_round_travels_after_the_products_of_rows(monkeypatch):
    order(monkeypatch, one_round)

    def of_rows(batch):
        return checkpoint_name(batch.rows, f"of rows {next(chunk)}") + batch.upstream + batch.products[0], batch.weights

    chunk = itertools.count()
    graph = backward_graph(of_rows, chunks=2)
    assert graph.names_before("products 0") == {"weights 0", "rows 0", "replicas"}
    first = {"weights 0", "rows 0", "replicas", "products 0", "rows 1"}
    # Rows of the next chunk travel beside the products for gradients of rows, and gradients of its outputs after these.
    assert graph.names_before("weights 1") == first
    assert graph.names_before("rows 2") == first | {"weights 1"}
    assert graph.names_before("rows 3") == first | {"weights 1", "rows 2", "of rows 0"}
    # The gradients of a chunk return after the first products of the next one.
    before = first | {"weights 1", "rows 2", "rows 3", "products 1", "of rows 0"}
    assert before <= graph.names_before("rows back 0") <= before | {"weights back 0"}


def test_gradients_of_outputs_travel_after_weights_if_rows_are_saved(monkeypatch):
    """They travel beside the products of the rows; the weights of rows arrive before, beside the gather."""
    order(monkeypatch, one_round)
    graph = backward_graph(lambda one: one[:2], lambda rows: Kept((rows,)))
    assert graph.names_before("weights 0") == set()
    assert graph.names_before("rows 0") == {"replicas", "weights 0"}


def test_rows_travel_last_if_hidden_activations_are_saved(monkeypatch):
    """Only gradients of `up` and gate need rows, so the rows travel beside the other products."""
    order(monkeypatch, one_round)

    def of_rows(batch):
        return checkpoint_name(batch.upstream, "products need") + batch.rows + batch.products[0], batch.weights

    graph = backward_graph(of_rows, lambda product: Kept(products=((product,),)))
    of_outputs = {"replicas", "weights 0"}
    assert graph.names_before("rows 0") == of_outputs
    assert graph.names_before("rows 1") == graph.names_before("products need") == of_outputs | {"rows 0"}


def layer_of(system, *sizes):
    sizes = sizes or (8,)
    mesh = make_mesh(sizes, ("node", "expert")[-len(sizes) :])
    return sharded_moe(mesh, Topology.from_mesh(mesh, mesh.axis_names), system)


def arguments():
    return Case().arguments("zipf", 8)


EVERYTHING, ROWS, HIDDEN = Saved(True, True, True), Saved(rows=True), Saved(hidden=True)
MESHES = {"direct": (8,), "once": (8,), "forward": (2, 4)}
"""Mesh of each dispatch."""


@functools.cache
def results(dispatch, transfer, saved=Saved(), max_rounds=None, chunks=1):
    """Return outputs, rounds and gradients of a layer whose buffer has 0.4 of the mean load."""
    system = exact(2, Buffers(0.4, max_rounds, chunks), dispatch=dispatch).replace(transfer=transfer, saved=saved)
    (y, stats), gradients = with_gradients(layer_of(system, *MESHES[dispatch]))(*arguments())
    return jax.device_get((y, stats.rounds[0], gradients))


@pytest.mark.slow
@parametrize(
    "dispatch, saved, options",
    [("once", ROWS, {}), ("once", EVERYTHING, {"chunks": 2})],
    [
        ("forward", EVERYTHING, {}),
        ("once", EVERYTHING, {}),
        ("once", HIDDEN, {}),
        ("forward", ROWS, {}),
        ("forward", HIDDEN, {}),
        ("direct", EVERYTHING, {"chunks": 2}),
        ("direct", EVERYTHING, {}),
        ("direct", HIDDEN, {}),
        ("direct", Saved(), {"max_rounds": 4, "chunks": 3}),
        ("once", ROWS, {"chunks": 2}),
        ("once", HIDDEN, {"max_rounds": 4, "chunks": 2}),
        ("once", Saved(), {"chunks": 2}),
    ],
    ids=str,
)
def test_chunks_and_saved_arrays_leave_values_unchanged(dispatch, saved, options):
    """Also in overflow rounds, which send their entries again, and of lists with a quantized transfer."""
    transfer = QuantizedTransfer(block=4) if saved == ROWS else None
    want, got = results(dispatch, transfer), results(dispatch, transfer, saved, **options)
    assert want[1] > 1
    if dispatch == "direct" or "chunks" in options:
        # Chunks, and rounds of other sizes, cut the sums over the rows of an expert in other places.
        assert_close(got[2][2], want[2][2], 1e-6)
        got, want = ((*one[:2], one[2][:2]) for one in (got, want))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.slow
@parametrize("is_one_slice", [True], [False])
def test_a_backward_pass_in_one_chunk_reads_saved_arrays_of_chunks(is_one_slice, monkeypatch):
    """On GPUs, where rows of a chunk are sorted by slot and those of all chunks once more, or are already."""
    monkeypatch.setattr(slot_weights.Slots, "adds_chunks", lambda *_: False)
    monkeypatch.setattr(Direct, "sends_one_slice_per_rank", lambda self, topology: is_one_slice)
    want, got = (results.__wrapped__("direct", None, *options) for options in ((), (EVERYTHING, None, 2)))
    assert_close(got[2][2], want[2][2], 1e-6)
    jax.tree.map(np.testing.assert_array_equal, (*got[:2], got[2][:2]), (*want[:2], want[2][:2]))


@functools.cache
def exchanges(system, sizes, policy=None, *, compiled=False):
    """Count the exchanges of a layer and its gradients, rematerialized by a policy if given."""
    layer = layer_of(system, *sizes)

    def loss(x, mask, kernel, experts, target):
        run = partial(layer, x, mask)
        run = run if policy is None else jax.checkpoint(run, policy=policy)
        return (run(kernel, experts)[0] * target).sum()

    lowered = jax.jit(jax.value_and_grad(loss, argnums=(0, 2, 3))).lower(*arguments())
    if compiled:
        return lowered.compile().as_text().count('custom_call_target="moe_lb_ragged_exchange"')
    return lowered.as_text().count("@moe_lb_ragged_exchange(")


@pytest.mark.slow
@parametrize(
    "dispatch, saved, fewer",
    # Rows travel on both hops of `Forward`.
    [("forward", ROWS, 2), ("once", Saved(rows=True, replicas=True), 4)],
    [("once", ROWS, 1)],
)
def test_saved_arrays_of_lists_are_not_transferred_again(dispatch, saved, fewer):
    system = exact(2, Buffers(max_rounds=1), dispatch=dispatch)
    before, after = (exchanges(one, MESHES[dispatch]) for one in (system, system.replace(saved=saved)))
    assert after == before - fewer


@pytest.mark.slow
@parametrize(
    "saved, names, fewer",
    [(ROWS, ("moe_dispatched_rows",), 1)],
    [
        (Saved(replicas=True), ("moe_replicas",), 3),
        (Saved(rows=True, hidden=True), ("moe_dispatched_rows", "moe_hidden"), 1),
        # Rematerialized; XLA removes one exchange, of the outputs, which are not used.
        (Saved(rows=True, replicas=True), (), -1),
    ],
)
def test_saved_arrays_are_not_transferred_again(saved, names, fewer):
    """One exchange of rows, or one for each weight array, less than in a layer that saves its inputs only."""
    policy, system = jax.checkpoint_policies.save_only_these_names, exact(2, Buffers(max_rounds=1))
    before = exchanges(system, (8,), policy(*CHECKPOINT_NAMES))
    assert exchanges(system.replace(saved=saved), (8,), policy(*CHECKPOINT_NAMES, *names)) == before - fewer


@pytest.mark.slow
@parametrize("dispatch", ["once"], ["forward"])
def test_received_choices_are_not_transferred_again(dispatch):
    """They are saved without an option; after a policy without their name, XLA keeps their exchanges alone."""
    policy, system = jax.checkpoint_policies.save_only_these_names, exact(2, Buffers(max_rounds=1), dispatch=dispatch)
    count = partial(exchanges, system, MESHES[dispatch], compiled=True)
    without, saved = (count(policy(*CHECKPOINT_NAMES, *names)) for names in ((), ("moe_choices",)))
    # `Forward` has an exchange on each hop.
    assert saved == without - {"once": 1, "forward": 2}[dispatch]


@pytest.mark.slow
@parametrize("names, computed", [(("moe_hidden",), 18)], [((), 22)], ids=["hidden", "a policy without the name"])
def test_saved_hidden_activations_are_not_computed_again(names, computed):
    """A product with one weight array is 2 units: 3 forward, twice 3 backward, and 2 to compute up and gate again."""
    policy = jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES, *names)
    layer = layer_of(exact(2, Buffers(max_rounds=1)).replace(saved=Saved(hidden=True)))

    def loss(x, mask, kernel, experts, target):
        run = jax.checkpoint(partial(layer, x, mask), policy=policy)
        return (run(kernel, experts)[0] * target).sum()

    text = jax.jit(jax.value_and_grad(loss, argnums=(0, 2, 3))).lower(*arguments()).compile().as_text()
    assert 2 * text.count('custom_call_target="moe_lb_grouped_') == computed


def test_bad_chunks_and_saved_arrays_are_refused():
    for dispatch in (TwoPhase, MultiRailDispatch):
        with pytest.raises(ValueError, match=rf"buffers.chunks is 2; expected 1 for {dispatch.__name__}"):
            dispatch(Buffers(chunks=2))
    with pytest.raises(ValueError, match=r"saved is Saved\(.*\); expected Saved\(\) for TwoPhase"):
        feplb().replace(saved=Saved(rows=True))
    assert rails().replace(saved=Saved(rows=True)).dispatch.saved.rows


def test_chunks_share_the_rows_of_a_round():
    assert [Direct(Buffers(1.05, chunks=chunks)).buffers.rows(32768) for chunks in (1, 2, 3)] == [34432, 34560, 34560]
    assert Buffers(0.5, chunks=2).rows(10) == 6
    for copies, chunks in itertools.product((1, 10, 700, 1000, 1500, 32768, 33333), (2, 3)):
        buffers = Buffers(0.7, chunks=chunks)
        assert buffers.in_one_chunk(copies).rows(copies) == buffers.rows(copies)
