from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_moe_lb import Losses, TokenInfo, TopK, Topology
from jax_moe_lb.core.types import iota
from jax_moe_lb.routing.losses import segment_loss, switch_loss, z_terms
from jax_moe_lb.routing.routers import mask_tokens, tokens_per_expert
from tests.layer_cases import make_mesh

MESH, ONE = (make_mesh((size,), ("expert",)) for size in (8, 1))
LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(64, 8)), jnp.float32)


def sequence_loss(routing, length, active=True):
    return segment_loss(routing, jnp.broadcast_to(active, 64), iota(64) // length, 64 // length)


@pytest.mark.slow
def test_switch_loss_is_1_when_uniform_and_e_when_collapsed():
    uniform, one_hot = jnp.full(8, 1 / 8), jnp.eye(8)[3]
    assert switch_loss(uniform, uniform) == pytest.approx(1)
    assert switch_loss(one_hot, one_hot) == pytest.approx(8)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[16, 16, 16, 16], [16, 9, 1, 0]])
def test_sequence_loss_against_a_loop(lengths):
    """The rest of a sequence is padding, which does not count, whatever its scores are."""
    active, free = np.arange(64) % 16 < np.repeat(lengths, 16), TopK(2)(LOGITS)
    routing = replace(mask_tokens(free, jnp.asarray(active)), scores=free.scores)
    expected = []
    for start in range(0, 64, 16):
        tokens = start + np.flatnonzero(active[start : start + 16])
        if not tokens.size:
            expected.append(0.0)
            continue
        fraction = np.bincount(np.asarray(routing.experts)[tokens].reshape(-1), minlength=8) / (2 * tokens.size)
        expected.append(8 * (fraction * np.asarray(routing.scores)[tokens].mean(0)).sum())
    assert sequence_loss(routing, 16, active) == pytest.approx(np.mean(expected), rel=1e-6)


def test_tokens_without_a_segment_are_in_none_if_there_are_more_than_their_dtype_has_numbers():
    """300 is 44 as int8."""
    segments = jnp.where(iota(64) < 32, 44, -1)
    found = (segment_loss(TopK(2)(LOGITS), jnp.ones(64, bool), segments.astype(d), 300) for d in ("int8", "int32"))
    np.testing.assert_array_equal(*found)


@pytest.mark.slow
def test_the_part_of_z_in_the_sum_is_its_loss_alone():
    routing = TopK(2)(LOGITS)
    counts = tokens_per_expert(routing.experts.reshape(1, -1), 8)
    tokens = TokenInfo(segments=jnp.zeros(64, jnp.int32), num_segments=1)

    def parts(losses):
        run = jax.shard_map(
            lambda: losses.with_z(routing, counts, Topology.from_mesh(ONE), tokens),
            mesh=ONE,
            in_specs=(),
            out_specs=PartitionSpec(),
        )
        return jax.jit(run)()

    others = Losses(switch=0.5, sequence=0.25)
    total, z = parts(Losses(switch=0.5, sequence=0.25, z=0.1))
    assert z == pytest.approx(float(0.1 * z_terms(routing.logits).mean()), rel=1e-6)
    assert total == pytest.approx(float(parts(others)[0] + z), rel=1e-6)
    assert parts(others)[1] is None


def group_loss(losses, mask=None):
    """Return the losses over 8 ranks of 8 tokens each."""

    def one_rank(logits, mask):
        routing = mask_tokens(TopK(2)(logits), mask)
        mine = tokens_per_expert(routing.experts.reshape(1, -1), 8)
        counts = jax.lax.all_gather(mine[0], "expert", to="invarying")
        rank = jax.lax.axis_index("expert")
        tokens = TokenInfo(mask=mask, segments=rank + 0 * iota(8), num_segments=8)
        return losses(routing, counts, Topology.from_mesh(MESH), tokens)

    mask = jnp.ones(64, bool) if mask is None else mask
    spec = PartitionSpec("expert")
    run = jax.shard_map(one_rank, mesh=MESH, in_specs=(spec, spec), out_specs=PartitionSpec())
    return jax.jit(lambda logits: run(logits, mask))


@pytest.mark.slow
def test_losses_over_a_group_equal_those_of_all_its_tokens():
    routing = TopK(2)(LOGITS)
    fraction = tokens_per_expert(routing.experts.reshape(1, -1), 8)[0] / 128
    expected = {
        Losses(switch=0.5): 0.5 * switch_loss(fraction, routing.scores.mean(0)),
        Losses(sequence=2.0): 2 * sequence_loss(routing, 8),
        Losses(z=0.1): 0.1 * jnp.square(jax.nn.logsumexp(LOGITS, axis=1)).mean(),
        Losses(): 0.0,
    }
    for losses, value in expected.items():
        assert group_loss(losses)(LOGITS) == pytest.approx(float(value), rel=1e-5)


@pytest.mark.slow
def test_gradients_of_the_switch_loss_over_a_group():
    def reference(logits):
        routing = TopK(2)(logits)
        return switch_loss(tokens_per_expert(routing.experts.reshape(1, -1), 8)[0] / 128, routing.scores.mean(0))

    got = jax.grad(group_loss(Losses(switch=1.0)))(LOGITS)
    np.testing.assert_allclose(got, jax.grad(reference)(LOGITS), atol=1e-7)


@pytest.mark.slow
def test_padding_tokens_do_not_count():
    mask = jnp.arange(64) < 40
    garbage = jnp.where(mask[:, None], LOGITS, 1e6)
    for losses in (Losses(switch=1.0), Losses(sequence=1.0), Losses(z=1.0)):
        np.testing.assert_allclose(group_loss(losses, mask)(garbage), group_loss(losses, mask)(LOGITS), rtol=1e-6)


@pytest.mark.slow
def test_bad_losses_are_refused():
    counts, topology = jnp.zeros((1, 8), jnp.int32), Topology.from_mesh(MESH)
    with pytest.raises(ValueError, match=r"segments is None; expected the segments of the tokens"):
        Losses(sequence=1.0)(TopK(2)(LOGITS), counts, topology)
    with pytest.raises(ValueError, match=r"num_segments is None; expected the segments of the tokens"):
        Losses(sequence=1.0)(TopK(2)(LOGITS), counts, topology, TokenInfo(segments=iota(64)))
