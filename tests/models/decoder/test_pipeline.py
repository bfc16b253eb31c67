"""A pipeline computes what the same microbatches give without one."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx

from jax_moe_lb import Losses
from models.architectures.config_json import Fields
from models.architectures.registry import configured
from models.config import BatchConfig, ModelConfig, ParallelConfig, TrainConfig
from models.data.marks import num_predicted
from models.decoder.stacked import StackedDecoder
from models.mesh import make_mesh, make_system, place_batch
from models.tiny_checkpoint import tiny_config
from models.training.step import loss_and_gradients, make_programs

LOSSES = ModelConfig(checkpoint="tiny", aux_loss=0.1, z_loss=0.01)


def decoder_config(name, num_layers, **options):
    fields = json.loads(tiny_config(name)) | {"num_hidden_layers": num_layers, "hidden_size": 32} | options
    return configured(Fields(json.dumps(fields)), predict_further=bool(options.get("num_nextn_predict_layers")))


def results(decoder, parallel, accumulate, tokens, further_weight=0.0):
    """Return loss, statistics and gradients of a batch."""
    train = TrainConfig(
        model=LOSSES, parallel=parallel, batch=BatchConfig(len(tokens), tokens.shape[1] - 1, accumulate), steps=5
    )
    mesh = make_mesh(parallel)
    programs = make_programs(train, mesh, make_system(parallel), decoder)

    @jax.jit
    def run(state, tokens):
        def loss(model, tokens, counts):
            return StackedDecoder.loss(model, tokens, counts, further_weight)

        counts = num_predicted(tokens, decoder.num_further)
        return loss_and_gradients(programs.model(state), nnx.Param, loss, tokens, counts, accumulate, mesh)

    return run(programs.init(), place_batch(tokens, mesh))


def assert_equal(got, want, tolerance=1e-5):
    np.testing.assert_allclose(got[0], want[0], rtol=tolerance)
    assert np.array_equal(got[1].counts, want[1].counts)
    for one, other in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    expected = dict(jax.tree.leaves_with_path(want[2]))
    for path, value in jax.tree.leaves_with_path(got[2]):
        other = np.asarray(expected.pop(path))
        assert np.abs(value - other).max() <= tolerance * np.abs(other).max() + 1e-8, jax.tree_util.keystr(path)
    assert not expected


@pytest.fixture
def tokens(all_devices):
    return np.asarray(jax.random.randint(jax.random.key(1), (16, 13), 0, 256))


CASES = {
    "alternating windows, a block a stage": (("gpt_oss", 4), ParallelConfig(2, 2, "exact", stages=2)),
    "alternating windows, two blocks a stage": (
        ("gpt_oss", 8),
        ParallelConfig(2, 1, "plain", stages=2, repeats=2, microbatches=4),
    ),
    "dense layers, latent attention, layers before": (
        ("deepseek_v3", 6),
        ParallelConfig(1, 2, "greedy", stages=2, repeats=2, microbatches=4, layers_before=1),
    ),
    "four stages": (("mixtral", 4), ParallelConfig(2, 1, "plain", stages=4, microbatches=8)),
}


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(("model", "parallel"), CASES.values(), ids=CASES)
def test_it_equals_one_microbatch_after_the_other(model, parallel, tokens):
    decoder = dataclasses.replace(decoder_config(*model), losses=Losses(switch=0.1, z=0.01))
    alone = dataclasses.replace(parallel, stages=1, repeats=1, microbatches=None, layers_before=0)
    # With one sequence a device, both have the same microbatches.
    batch = tokens[: parallel.data_parallel * parallel.expert_parallel * parallel.num_microbatches]
    assert_equal(results(decoder, parallel, 1, batch), results(decoder, alone, parallel.num_microbatches, batch))
