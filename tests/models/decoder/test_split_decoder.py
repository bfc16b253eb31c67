"""A stacked, sharded decoder equals the plain decoder, and each device holds only its part."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from jax_moe_lb.layer.systems import system_named
from models.architectures.config_json import Fields
from models.architectures.registry import configured
from models.config import BatchConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from models.data.marks import marked, num_predicted
from models.decoder import stacked
from models.decoder.model import Decoder
from models.decoder.stacked import StackedDecoder
from models.mesh import make_mesh, make_system, place_batch
from models.tiny_checkpoint import tiny_config
from models.training.step import loss_and_gradients, make_programs
from tests.models.reference_loss import next_token_loss
from tests.models.small import filled

PARALLEL, OPTIMIZER = ParallelConfig(2, 4, "exact"), OptimizerConfig(1e-2)
TRAIN = TrainConfig(parallel=PARALLEL, batch=BatchConfig(8), steps=5, optimizer=OPTIMIZER)


@pytest.fixture
def tokens(monkeypatch, all_devices):
    """Use a shorter last block of the loss."""
    monkeypatch.setattr(stacked, "LOSS_BLOCK", 8)
    return np.asarray(jax.random.randint(jax.random.key(1), (8, 21), 0, 256))


def of_decoder(config, tokens):
    """Return loss and gradients with all parameters except experts replicated on four devices."""
    mesh = make_mesh(ParallelConfig(1, 4))
    model = Decoder(config, mesh=mesh, system=system_named("plain"), rngs=nnx.Rngs(0))
    (loss, (_, stats)), gradients = nnx.jit(nnx.value_and_grad(next_token_loss, has_aux=True))(model, tokens)
    return loss, stats, gradients


def programs_of(name):
    config = configured(Fields(tiny_config(name)))
    mesh = make_mesh(TRAIN.parallel)
    return config, mesh, make_programs(TRAIN, mesh, system_named("exact"), config)


def flat(state):
    return {path: np.asarray(variable.get_value()) for path, variable in nnx.to_flat_state(state)}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "granitemoe", "qwen3_next"])
def test_values_and_gradients_are_those_of_the_decoder(name, tokens):
    """Dense layers, latent attention; alternating windows, of period 2; multipliers; delta networks, of period 4."""
    config, mesh, programs = programs_of(name)

    @jax.jit
    def run(state, tokens):
        model = programs.model(state)
        return nnx.value_and_grad(StackedDecoder.loss, has_aux=True)(model, tokens, num_predicted(tokens))

    (split_loss, (_, split_stats)), split_gradients = run(programs.init(), place_batch(tokens, mesh))
    loss, stats, gradients = of_decoder(config, tokens)
    np.testing.assert_allclose(split_loss, loss, rtol=1e-5)
    assert np.array_equal(split_stats.counts.sum((1, 2)), stats.counts.sum((1, 2)))
    want = flat(gradients)
    # Dense layers form the first stack.
    first = len(config.dense_layers)
    for path, value in flat(split_gradients).items():
        if path[0] == "stacks":
            layers = range(first) if first and path[1] == 0 else range(first, config.num_layers)
            period = 2 if config.windows else 4 if config.delta else 1
            expected = np.stack([want.pop(("blocks", layer, *path[3:])) for layer in layers[path[2] :: period]])
        else:
            expected = want.pop(path)
        assert np.abs(value - expected).max() <= 1e-4 * np.abs(expected).max() + 1e-7, path
    assert not want


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_padding_is_not_routed(stages, all_devices):
    """Loss and gradients of the other tokens stay the same."""
    rng, (rows, length) = np.random.default_rng(0), (8, 17)
    config = dataclasses.replace(configured(Fields(tiny_config("mixtral"))), num_layers=stages)
    parallel = ParallelConfig(1, 2, "exact", headroom=2.0, max_rounds=1, stages=stages)
    train = dataclasses.replace(TRAIN, parallel=parallel, model=ModelConfig(checkpoint="tiny"))
    starts, padding = np.zeros((rows, length), bool), np.arange(length) >= rng.integers(3, length, (rows, 1))
    starts[:, 0] = True
    starts |= padding & ~np.roll(padding, 1, 1)
    drawn = rng.integers(0, 256, (rows, length))
    mesh, results = make_mesh(parallel), []
    for context, kept in ((padding, None), (np.zeros_like(padding), padding)):
        programs = make_programs(train, mesh, make_system(parallel), config, has_padding=kept is not None)
        tokens = place_batch(marked(drawn, starts, context, kept), mesh)

        @jax.jit
        def run(state, tokens, programs=programs):
            model, counts = programs.model(state), num_predicted(tokens)
            return loss_and_gradients(model, nnx.Param, StackedDecoder.loss, tokens, counts, 1, mesh)

        results.append(run(filled(programs.state_shapes), tokens))
    (loss, stats, gradients), (loss_without, stats_without, gradients_without) = results
    np.testing.assert_allclose(loss_without, loss, rtol=1e-5)
    for path, value in flat(gradients).items():
        np.testing.assert_allclose(flat(gradients_without)[path], value, atol=1e-5, err_msg=str(path))
    per_layer = config.router.num_experts_per_tok * np.array([rows * (length - 1), (~padding[:, :-1]).sum()])
    for found, copies in zip((stats, stats_without), per_layer, strict=True):
        assert np.asarray(found.counts).reshape(stages, -1).sum(1).tolist() == [copies] * stages
