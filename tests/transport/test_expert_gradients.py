"""Encoded gradients of gathered experts: sums, residuals, exchanges, and what error feedback makes of them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_moe_lb import Experts
from jax_moe_lb.collectives.permutes import exchange_of_pair, exchange_tiles
from jax_moe_lb.transport import Codec, CodecBase, GatherExpertDomain, scan_prefetched
from jax_moe_lb.transport.compression import Encoded
from tests.layer_cases import expert_domains, make_mesh, over_domains
from tests.marks import parametrize

SHAPE, RATIO = (6, 10), 5.0
KEPT = Codec(RATIO).num_kept(60, 4)


def migrating(codec, **domain_sizes):
    """Return two datacenters of two nodes with one expert per rank, and domains of these sizes."""
    mesh, domains = expert_domains(make_mesh((2, 2), ("dc", "node")), domain_sizes, tuple(domain_sizes))
    return mesh, GatherExpertDomain(domains, codec)


def on_mesh(mesh, migrate, function, *args):
    return over_domains(mesh, migrate.domains, function, *args)


def experts_of(numbers):
    return Experts(jnp.asarray(numbers, "float32"), jnp.asarray(numbers, "float32").swapaxes(1, 2))


def step(migrate):
    """Return a function `(home, residual, gradients of held experts) -> (gradients of home, residual)`."""

    def run(home, residual, upstream):
        pull_back = jax.vjp(lambda home, residual: migrate(home, residual=residual), home, residual)[1]
        return pull_back(upstream)

    return run


def top_k(gradients, residual):
    """Return the entries that are sent of each matrix, and those that are left, in NumPy."""
    total = gradients + residual
    flat = total.reshape(len(total), -1)
    sent = np.zeros_like(flat)
    for row, values in enumerate(flat):
        kept = np.argsort(-np.abs(values), kind="stable")[:KEPT]
        sent[row, kept] = values[kept]
    sent = sent.reshape(total.shape)
    return sent, total - sent


def sent_home(gradients, residual, sizes):
    """Compute `sent_home` of all ranks `[R, blocks, ...]`, in NumPy, for domains of these sizes, innermost first.

    Ranks of a domain are numbered by their offset at the innermost level, then at the outer ones, as `axis_index`.
    """
    left = []
    for level, size in enumerate(sizes):
        outer = int(np.prod(sizes[level + 1 :]))
        block = gradients.shape[1] // size
        begin = sum(part.shape[1] for part in left)
        earlier = residual[:, begin : begin + gradients.shape[1]]
        sums = np.zeros_like(gradients[:, :block])
        kept = np.zeros_like(gradients)
        for rank in range(len(gradients)):
            me = rank // outer % size
            for to in range(size):
                at = slice(to * block, (to + 1) * block)
                peer = rank + (to - me) * outer
                sent, rest = top_k(gradients[rank, at], earlier[rank, at])
                if to == me:
                    sent, rest = gradients[rank, at] + earlier[rank, at], 0
                sums[peer] += sent
                kept[rank, at] = rest
        gradients = sums
        left.append(kept)
    return gradients, np.concatenate(left, 1)


@pytest.mark.slow
@parametrize("nodes", [1], [2])
def test_gradients_come_home_encoded_level_by_level_and_the_rest_stays(nodes):
    sizes = {"dc": 2, "node": nodes}
    mesh, migrate = migrating(Codec(gradient_ratio=RATIO), **sizes)
    inside = [size for size in reversed(sizes.values()) if size > 1]
    held, parts = int(np.prod(inside)), sum(int(np.prod(inside[at:])) for at in range(len(inside)))
    rng = np.random.default_rng(0)
    home = experts_of(rng.normal(size=(4, *SHAPE)))
    zeros = on_mesh(mesh, migrate, migrate.initial_residual, home)
    assert zeros.up.shape == (4 * parts, *SHAPE)
    assert not np.any(zeros.up)
    residual, known = zeros, np.zeros((4, parts, *SHAPE))
    for _ in range(3):
        upstream = rng.normal(size=(4, held, *SHAPE)).astype("float32")
        got, residual = on_mesh(mesh, migrate, step(migrate), home, residual, experts_of(upstream.reshape(-1, *SHAPE)))
        want, known = sent_home(upstream.astype(float), known, inside)
        np.testing.assert_allclose(got.up, want.reshape(-1, *SHAPE), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(residual.up, known.reshape(-1, *SHAPE), rtol=1e-5, atol=1e-6)
        assert np.any(known)


@pytest.mark.slow
@parametrize("dtype", ["float32"], ["bfloat16"])
def test_no_gradient_is_lost(dtype):
    """What has come home and what is left sum to the gradients of all steps; without new ones the rest arrives."""
    mesh, migrate = migrating(Codec(RATIO, CodecBase.REMEMBERED, gradient_ratio=RATIO), dc=2, node=2)
    exact = GatherExpertDomain(migrate.domains)
    rng = np.random.default_rng(0)
    home = jax.tree.map(lambda w: w.astype(dtype), experts_of(rng.normal(size=(4, *SHAPE))))
    upstream = jax.tree.map(lambda w: w.astype(dtype), experts_of(rng.normal(size=(16, *SHAPE))))

    def run(home, upstream):
        known = migrate.known(home)

        def of_step(residual, gradients):
            pull_back = jax.vjp(lambda home, left: migrate.update(home, known, left)[0], home, residual)[1]
            sent, residual = pull_back(gradients)
            return residual, sent

        zeros = jax.tree.map(jnp.zeros_like, upstream)
        residual, first = of_step(migrate.initial_residual(home), upstream)
        _, later = jax.lax.scan(lambda left, _: of_step(left, zeros), residual, length=4 * 60 // KEPT)
        whole = jax.vjp(exact, home)[1](upstream)[0]
        total = jax.tree.map(lambda one, rest: one.astype("float32") + rest.astype("float32").sum(0), first, later)
        return first, whole, total

    first, whole, total = on_mesh(mesh, migrate, run, home, upstream)
    first, whole = np.asarray(first.up, "float32"), np.asarray(whole.up, "float32")
    assert np.abs(first - whole).max() > 0.5
    # The sums of four bfloat16 gradients are rounded.
    np.testing.assert_allclose(total.up, whole, atol=1e-5 if dtype == "float32" else 0.05)


@pytest.mark.slow
def test_encoded_experts_travel_in_one_exchange_per_level_and_direction():
    mesh, migrate = migrating(Codec(RATIO, CodecBase.ZERO, gradient_ratio=RATIO), dc=2, node=2)
    home = experts_of(np.ones((4, *SHAPE)))
    residual = on_mesh(mesh, migrate, migrate.initial_residual, home)
    spec = PartitionSpec(migrate.domains.expert_axes)

    def run(home, residual):
        held, pull_back = jax.vjp(lambda home, residual: migrate(home, residual=residual), home, residual)
        return held, pull_back(held)

    text = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)).lower(home, residual).as_text()
    exchanges = re.findall(r"stablehlo\.(all_gather|all_to_all|reduce_scatter|all_reduce|collective_permute)", text)
    assert sorted(exchanges) == ["all_gather"] * 2 + ["all_to_all"] * 2
    # Values and indices of both matrices of an expert, and no padding.
    assert f"tensor<2x{2 * KEPT * 6 // 4}xui32>" in text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_words_hold_all_bits(dtype):
    rng = np.random.default_rng(0)
    with jax.enable_x64(dtype == "float64"):
        values = jnp.asarray(rng.normal(size=(3, 7)), dtype)
        indices = jnp.asarray(rng.integers(0, 1 << 16, (3, 7)), "uint16")
        far = jnp.asarray(rng.integers(0, 1 << 30, (3, 7)), "int32")
        encoded = Encoded((values, values[:, :4]), (indices, far))
        one = jax.tree.map(lambda leaf: leaf[:1], encoded)
        jax.tree.map(np.testing.assert_array_equal, one.from_words(encoded.words), encoded)
        assert encoded.words.dtype == jnp.uint32


@pytest.mark.slow
def test_exchanges_of_a_pair_are_those_of_xla():
    mesh = make_mesh((2, 2), ("one", "other"))
    tiles = jnp.arange(16.0).reshape(16, 1)
    spec = PartitionSpec(("one", "other"))

    def run(exchange):
        return jax.shard_map(lambda tiles: exchange(tiles, "one"), mesh=mesh, in_specs=spec, out_specs=spec)(tiles)

    np.testing.assert_array_equal(run(exchange_of_pair), run(exchange_tiles))
    assert np.any(run(exchange_tiles) != tiles)


def test_a_missing_residual_is_named():
    mesh, migrate = migrating(Codec(2.0, CodecBase.ZERO), dc=2, node=1)
    with pytest.raises(ValueError, match="residual is None; expected the result of initial_residual"):
        on_mesh(mesh, migrate, migrate, experts_of(np.ones((4, *SHAPE))))
    mesh, migrate = migrating(Codec(2.0, CodecBase.ZERO, gradient_ratio=1.0), dc=2, node=1)
    with pytest.raises(ValueError, match="residual is given; expected None"):
        on_mesh(mesh, migrate, lambda home: migrate(home, residual=home), experts_of(np.ones((4, *SHAPE))))
    assert not migrating(Codec(gradient_ratio=2.0), dc=1, node=1)[1].needs_residual


@pytest.mark.slow
@parametrize("gather_again", [False], [True])
def test_prefetched_layers_have_the_residuals_of_a_loop(gather_again):
    mesh, migrate = migrating(Codec(gradient_ratio=RATIO), dc=2, node=1)
    rng = np.random.default_rng(0)
    layers = [experts_of(rng.normal(size=(4, *SHAPE))) for _ in range(3)]
    home = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    x = jnp.asarray(rng.normal(size=(4, SHAPE[0])), "float32")

    def block(x, layer, held):
        del layer
        return jnp.tanh(x + jnp.tanh(x @ held.up.mean(0)) @ held.down.mean(0)), None

    def prefetched(x, home, residual):
        return scan_prefetched(block, x, jnp.zeros(3), home, migrate, None, residual, gather_again=gather_again)[0]

    def looped(x, home, residual):
        for layer in range(3):
            one, left = jax.tree.map(lambda leaf, layer=layer: leaf[layer], (home, residual))
            x = block(x, None, migrate(one, residual=left))[0]
        return x

    def gradients(run):
        def of_rank(x, home):
            residual = jax.vmap(migrate.initial_residual)(home)
            return jax.grad(lambda *args: jnp.square(run(*args)).sum(), (1, 2))(x, home, residual)

        ranks, stacked = PartitionSpec(migrate.domains.expert_axes), PartitionSpec(None, migrate.domains.expert_axes)
        return jax.jit(jax.shard_map(of_rank, mesh=mesh, in_specs=(ranks, stacked), out_specs=stacked))(x, home)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradients(prefetched), gradients(looped))
