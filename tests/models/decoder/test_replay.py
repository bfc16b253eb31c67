"""Experts of generated sequences, replayed in the passes of training."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_moe_lb import Buffers, plain
from models.config import BatchConfig, ModelConfig, ParallelConfig, TrainConfig
from models.data.marks import marked
from models.mesh import make_mesh, make_system, place_batch
from models.pretrained.generation import Generator
from models.training.step import make_programs
from tests.models.decoder.test_pipeline import decoder_config
from tests.models.small import filled, random_decoder

PARALLEL = ParallelConfig(2, 2, headroom=2.0, max_rounds=1)


@pytest.mark.slow
def test_generated_routing_replays_in_training(all_devices):
    """Logits of the replay choose the generated tokens, and counts are those of the rollout, with another router."""
    config, mesh = decoder_config("glm4_moe", 3), make_mesh(PARALLEL)
    model = random_decoder(config, mesh, plain(Buffers(2.0, max_rounds=1)))
    prompts = [[3, 1, 4, 1], [5, 9, 2, 6]]
    lines, routing = Generator(model)(prompts, 4, return_routing=True)
    experts = jnp.asarray(np.stack(routing, 1))
    layers = sum(block.moe is not None for block in model.blocks)
    assert experts.shape == (layers, 2, 7, config.router.num_experts_per_tok)
    tokens = jnp.array([prompt + line[:-1] for prompt, line in zip(prompts, lines, strict=True)], jnp.int32)
    call = nnx.jit(lambda model, tokens, experts: model(tokens, experts=experts))
    logits, stats = call(model, tokens, experts)
    assert logits[:, 3:].argmax(-1).tolist() == lines
    for block in model.blocks:
        if block.moe is not None:
            block.moe.kernel[...] = -block.moe.kernel[...]
    moved, other = call(model, tokens, experts)
    np.testing.assert_array_equal(other.counts, stats.counts)
    assert jnp.abs(moved - logits).max() > 0
    free = nnx.jit(lambda model, tokens: model(tokens))(model, tokens)[1]
    assert not np.array_equal(free.counts, stats.counts)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_training_step_takes_given_experts(accumulate, all_devices):
    """The loads of the step are those of the given experts, microbatch by microbatch."""
    config = decoder_config("glm4_moe", 3)
    batch = BatchConfig(8, 6, accumulate)
    train = TrainConfig(model=ModelConfig(checkpoint="tiny"), parallel=PARALLEL, batch=batch, steps=2)
    mesh = make_mesh(PARALLEL)
    programs = make_programs(train, mesh, make_system(PARALLEL), config)
    rng, per_token = np.random.default_rng(0), config.router.num_experts_per_tok
    nothing = np.zeros((8, 7), bool)
    tokens = place_batch(marked(rng.integers(0, 256, (8, 7)).astype(np.int32), nothing, nothing), mesh)
    order = rng.permuted(np.broadcast_to(np.arange(config.num_experts), (2, 8, 6, config.num_experts)), axis=-1)
    experts = order[..., :per_token].astype(np.int32)
    _, loss, _, stats = programs.step(filled(programs.state_shapes), tokens, jnp.asarray(experts))
    assert np.isfinite(loss)
    want = np.stack([np.bincount(one.ravel(), minlength=config.num_experts) for one in experts])
    np.testing.assert_array_equal(np.asarray(stats.counts).sum((1, 2)), want)
