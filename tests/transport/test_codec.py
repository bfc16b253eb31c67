"""Encoded experts: bytes sent, values received, and gradients at home."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_moe_lb import Experts
from jax_moe_lb.transport import Codec, CodecBase, GatherExpertDomain
from jax_moe_lb.transport.compression import average
from tests.layer_cases import expert_domains, make_mesh, over_domains


def alike(num_experts=4, seed=0, spread=0.1):
    """Return experts that differ little from each other."""
    rng = np.random.default_rng(seed)

    def weights(*shape):
        return jnp.asarray(rng.normal(size=shape) + spread * rng.normal(size=(num_experts, *shape)), "float32")

    return Experts(weights(6, 10), weights(10, 6), weights(6, 10))


def mean_of(experts):
    return jax.tree.map(lambda w: w.mean(0), experts)


def distance(a, b):
    squares = jax.tree.map(lambda x, y: jnp.square(x - y).sum(), a, b)
    return float(np.sqrt(sum(jax.tree.leaves(squares))))


def domains_on(mesh, **domain_sizes):
    return expert_domains(mesh, domain_sizes, tuple(domain_sizes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_are_those_of_values_and_indices(dtype):
    shapes = ((2, 40, 50), (2, 50, 40))
    experts = Experts(*(jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype) for shape in shapes))
    for ratio in (1.5, 100.0):
        codec = Codec(ratio)
        encoded = codec.encode(experts, None)
        travels = sum(leaf.nbytes for leaf in jax.tree.leaves(encoded))
        assert travels == codec.encoded_bytes(experts) <= experts.nbytes / ratio
        assert travels > experts.nbytes / ratio - 4 * (experts.up.dtype.itemsize + 2)
    assert Codec().encoded_bytes(experts) == experts.nbytes
    # An index of up to 65536 entries takes two bytes, above four.
    assert Codec(2.0).num_kept(1 << 16, 4) == (1 << 16) * 4 // (2 * 6)
    assert Codec(2.0).num_kept((1 << 16) + 8, 4) == ((1 << 16) + 8) * 4 // (2 * 8)
    assert Codec(100.0).num_kept(10, 4) == 1


@pytest.mark.slow
def test_the_largest_entries_arrive_and_the_rest_is_the_mean():
    experts = alike()
    mean, codec = mean_of(experts), Codec(4.0)
    encoded = codec.encode(experts, mean)
    decoded = codec.decode(encoded, mean, experts)
    residual, count = np.asarray(experts.up - mean.up[None]).reshape(4, -1), codec.num_kept(60, 4)
    for expert in range(4):
        kept = np.sort(np.argsort(-np.abs(residual[expert]))[:count])
        np.testing.assert_array_equal(np.sort(encoded.indices[0][expert]), kept)
        want = np.array(mean.up).reshape(-1)
        want[kept] += residual[expert][kept]
        np.testing.assert_allclose(decoded.up[expert].reshape(-1), want, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_left_out_comes_later(dtype):
    """Constant weights are transferred completely within `ratio` updates; changing weights lag by as many updates."""
    experts = jax.tree.map(lambda w: w.astype(dtype), alike())
    codec = Codec(10.0, CodecBase.REMEMBERED)
    num_calls = 2 * 60 // codec.num_kept(60, experts.up.dtype.itemsize)

    def lag(moves):
        def call(known, number):
            now = jax.tree.map(lambda w, m: w + number.astype(w.dtype) * m, experts, moves)
            known = codec.decode(codec.encode(now, known), known, known)
            return known, now

        zeros = jax.tree.map(lambda w: jnp.zeros_like(w, dtype="float32"), experts)
        known, now = jax.lax.scan(call, zeros, jnp.arange(num_calls))
        return jax.tree.map(lambda k, n: k - n[-1].astype("float32"), known, now)

    def norm(tree):
        return distance(tree, jax.tree.map(jnp.zeros_like, tree))

    size = norm(experts)
    assert norm(lag(jax.tree.map(jnp.zeros_like, experts))) < 1e-6 * size
    behind = norm(lag(jax.tree.map(lambda w: 0.01 * jnp.flip(w), experts)))
    assert 0 < behind < num_calls / 2 * 0.01 * size


def product(held, target):
    return sum(jax.tree.leaves(jax.tree.map(lambda h, t: (h * t.astype(h.dtype)).sum(), held, target)))


@pytest.mark.slow
def test_own_experts_stay_exact_and_all_gradients_come_home():
    """Two datacenters of two nodes, domains across all four; one expert per rank."""
    mesh, domains = domains_on(make_mesh((2, 2), ("dc", "node")), dc=2, node=2)
    experts, ratio = alike(), 5.0
    target = jax.tree.map(
        lambda w: jnp.asarray(np.random.default_rng(9).normal(size=(16, *w.shape[1:])), "float32"), experts
    )
    codec = Codec(ratio, CodecBase.SHARED, gradient_ratio=1.0)

    def loss_gradients(codec):
        def run(home, target):
            def loss(home):
                return product(GatherExpertDomain(domains, codec)(home), target)

            return jax.grad(loss)(home), GatherExpertDomain(domains, codec)(home)

        return over_domains(mesh, domains, run, experts, target)

    gradients, held = loss_gradients(codec)
    want_gradients, exact = loss_gradients(Codec())
    jax.tree.map(np.testing.assert_array_equal, gradients, want_gradients)
    mean = mean_of(experts)
    decoded = codec.decode(codec.encode(experts, mean), mean, experts)
    for rank in range(4):
        want = np.array(decoded.up)
        want[rank] = experts.up[rank]
        np.testing.assert_allclose(held.up[4 * rank : 4 * rank + 4], want, atol=1e-6)
        np.testing.assert_array_equal(exact.up[4 * rank : 4 * rank + 4], experts.up)
        np.testing.assert_array_equal(held.up[4 * rank + rank], experts.up[rank])


@pytest.mark.slow
def test_domains_remember_the_same_and_gradients_come_home():
    """Two datacenters of two nodes, domains across datacenters; home experts in bfloat16, remembered in float32."""
    mesh, domains = domains_on(make_mesh((2, 2), ("dc", "node")), dc=2, node=1)
    migrate = GatherExpertDomain(domains, Codec(5.0, gradient_ratio=1.0))
    before, after = (jax.tree.map(lambda w: w.astype("bfloat16"), alike(8, seed)) for seed in (0, 1))
    target = jax.tree.map(lambda w: jnp.tile(w, (2, 1, 1)), alike(8, 2))

    def run(before, after, target):
        def loss(home, known):
            held, known = migrate.update(home, known)
            return product(held, target), (held, known)

        known = jax.tree.map(lambda leaf: leaf.astype("float32"), migrate.known(before))
        gradients, (held, known) = jax.grad(loss, has_aux=True)(after, known)
        exact = jax.grad(lambda home: product(GatherExpertDomain(domains)(home), target))(after)
        last = jax.lax.fori_loop(0, 20, lambda _, known: migrate.update(after, known)[1], known)
        return gradients, exact, held, known, GatherExpertDomain(domains)(after), last

    gradients, exact, held, known, whole, last = over_domains(mesh, domains, run, before, after, target)
    jax.tree.map(np.testing.assert_array_equal, gradients, exact)
    by_rank = np.asarray(known.up).reshape(4, 4, 6, 10)
    # Ranks of a domain are adjacent.
    np.testing.assert_array_equal(by_rank[0], by_rank[1])
    np.testing.assert_array_equal(by_rank[2], by_rank[3])
    held, whole = (np.asarray(experts.up, "float32").reshape(4, 2, 2, 6, 10) for experts in (held, whole))
    for rank in range(4):
        mine = rank % 2
        np.testing.assert_array_equal(held[rank, mine], whole[rank, mine])
        np.testing.assert_array_equal(
            held[rank, 1 - mine], by_rank[rank].reshape(2, 2, 6, 10)[1 - mine].astype(jnp.bfloat16).astype("float32")
        )
        assert (held[rank, 1 - mine] != whole[rank, 1 - mine]).any()
    np.testing.assert_array_equal(np.asarray(last.up).reshape(whole.shape), whole)


@pytest.mark.slow
def test_packing_ahead_is_packing_on_the_way():
    mesh, domains = domains_on(make_mesh((4,), ("gpu",)), gpu=2)
    migrate = GatherExpertDomain(domains, Codec(5.0, CodecBase.SHARED, gradient_ratio=1.0))

    def ahead(home):
        return migrate(home, migrate.pack(home))

    experts = alike(8)
    packed, on_the_way = (over_domains(mesh, domains, form, experts) for form in (ahead, migrate))
    jax.tree.map(np.testing.assert_array_equal, packed, on_the_way)
    # The mean of all experts, including other domains, is equal on all ranks.
    mean = over_domains(mesh, domains, lambda home: average(home, domains.expert_axes), experts, out=PartitionSpec())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), mean, mean_of(experts))


@pytest.mark.slow
def test_an_older_mean_does():
    """The all-reduce of the mean may overlap the backward pass and use the weights before the step."""
    mesh, domains = domains_on(make_mesh((4,), ("gpu",)), gpu=2)
    migrate = GatherExpertDomain(domains, Codec(2.0, CodecBase.SHARED, gradient_ratio=1.0))
    before, after = alike(8), jax.tree.map(lambda w: w + 0.01, alike(8))

    def run(before, after):
        return migrate(after, migrate.pack(after, migrate.average(before)))

    held = over_domains(mesh, domains, run, before, after)
    fresh = over_domains(mesh, domains, migrate, after)
    both = jax.tree.map(
        lambda w: np.asarray(w).reshape(2, 2, 2, *w.shape[1:]).repeat(2, 1).reshape(16, *w.shape[1:]), after
    )
    assert distance(held, both) < 1.2 * distance(fresh, both)


def test_a_codec_that_remembers_needs_a_state():
    domains = domains_on(make_mesh((4,), ("gpu",)), gpu=2)[1]
    with pytest.raises(ValueError, match=r"codec.base is CodecBase.REMEMBERED; expected another"):
        GatherExpertDomain(domains, Codec(2.0))(alike())
    assert not Codec(1.0).remembers
    with pytest.raises(ValueError, match=r"codec is Codec\(ratio=2.0, .*; expected a ratio above 1 and"):
        GatherExpertDomain(domains, Codec(2.0, CodecBase.SHARED)).update(alike(), alike())
    with pytest.raises(ValueError, match="known has 4 experts; expected the domain's 8"):
        GatherExpertDomain(domains, Codec(2.0)).update(alike(), alike())


def test_experts_are_whole_by_default_and_encoded_ones_are_remembered_with_encoded_gradients():
    assert not Codec().compresses
    assert not Codec().of_gradients.compresses
    assert Codec(50.0).remembers
    assert Codec(50.0).of_gradients == Codec(5.0, CodecBase.ZERO, gradient_ratio=1.0)
    assert not Codec(50.0, gradient_ratio=1.0).of_gradients.compresses
    assert Codec(gradient_ratio=8.0).of_gradients.ratio == 8.0
