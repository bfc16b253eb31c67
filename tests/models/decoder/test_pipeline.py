"""A pipeline computes what the same microbatches give without one."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jax_moe_lb import Losses
from models.architectures.config_json import Fields
from models.architectures.registry import configured
from models.config import BatchConfig, ModelConfig, ParallelConfig, TrainConfig
from models.data.marks import marked, num_predicted
from models.decoder.pipeline import check_stages
from models.decoder.stacked import StackedDecoder
from models.mesh import make_mesh, make_system, place_batch
from models.tiny_checkpoint import tiny_config
from models.training.step import loss_and_gradients, make_programs
from tests.marks import parametrize
from tests.models.small import filled

CHECKPOINT = ModelConfig(checkpoint="tiny")


def decoder_config(name, num_layers, num_further=0):
    fields = json.loads(tiny_config(name)) | {"num_hidden_layers": num_layers, "hidden_size": 32}
    if num_further:
        fields["num_nextn_predict_layers"] = num_further
    return configured(Fields(json.dumps(fields)), predict_further=num_further > 0)


def results(decoder, parallel, accumulate, tokens, state=None):
    """Return loss, statistics and gradients of a batch, and the state, which is initialized by default."""
    batch = BatchConfig(len(tokens), tokens.shape[1] - 1, accumulate)
    train = TrainConfig(model=CHECKPOINT, parallel=parallel, batch=batch, steps=5)
    mesh = make_mesh(parallel)
    programs = make_programs(train, mesh, make_system(parallel), decoder)

    @jax.jit
    def run(state, tokens):
        def loss(model, tokens, counts):
            return StackedDecoder.loss(model, tokens, counts, 0.3 if decoder.num_further else 0.0)

        counts = num_predicted(tokens, decoder.num_further)
        return loss_and_gradients(programs.model(state), nnx.Param, loss, tokens, counts, accumulate, mesh)

    shapes, structure = jax.tree.flatten(programs.state_shapes)
    if state is None:
        state = filled(programs.state_shapes)
    else:
        placed = zip(jax.tree.leaves(state), shapes, strict=True)
        state = jax.tree.unflatten(structure, [jax.device_put(leaf, shape.sharding) for leaf, shape in placed])
    return *run(state, place_batch(tokens, mesh)), state


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
    """Return sequences of documents, which start at random tokens."""
    values = np.random.default_rng(1).integers(0, 256, (16, 13))
    starts = np.random.default_rng(2).random(values.shape) < 0.2
    return marked(values, starts, np.zeros(values.shape, bool))


BLOCKS = {"stages": 2, "repeats": 2, "microbatches": 4}
CASES = {
    "one microbatch a stage": (("mixtral", 2), ParallelConfig(2, 1, "plain", max_rounds=1, stages=2)),
    "alternating windows, a block a stage": (("gpt_oss", 4), ParallelConfig(2, 2, "exact", stages=2)),
    "alternating windows, two blocks a stage": (("gpt_oss", 8), ParallelConfig(2, 1, "plain", **BLOCKS)),
    "dense layers, layers before, multi-token prediction": (
        ("deepseek_v3", 6, 1),
        ParallelConfig(1, 2, "greedy", **BLOCKS, layers_before=1),
    ),
    "delta networks": (("qwen3_next", 8), ParallelConfig(1, 2, "plain", stages=2)),
    "four stages": (("mixtral", 4), ParallelConfig(2, 1, "plain", stages=4, microbatches=8)),
}


@pytest.mark.slow
@parametrize("case", ["one microbatch a stage"], CASES)
def test_it_equals_one_microbatch_after_the_other(case, tokens):
    """Loss, gradients and all statistics of balanced layers, in float32."""
    model, parallel = CASES[case]
    decoder = dataclasses.replace(decoder_config(*model), losses=Losses(switch=0.1, z=0.01))
    alone = dataclasses.replace(parallel, stages=1, repeats=1, microbatches=None, layers_before=0)
    # With one sequence a device, both have the same microbatches.
    batch = tokens[: parallel.data_parallel * parallel.expert_parallel * parallel.num_microbatches]
    want = results(decoder, alone, parallel.num_microbatches, batch)
    assert_equal(results(decoder, parallel, 1, batch, want[3]), want)


def test_meshes_without_the_stages_are_refused(all_devices):
    with pytest.raises(ValueError, match=r"mesh has the axes {'data': 2, 'expert': 4}; expected 'stage' of size 2"):
        check_stages(ParallelConfig(1, 4, stages=2), make_mesh(ParallelConfig(2, 4)), 8, 1)


@pytest.mark.parametrize(
    ("num_layers", "period", "options", "message"),
    [
        (58, 1, {}, "layers_before is 0; expected a number that leaves a multiple of 4 of the 58 layers with experts"),
        (58, 1, {"layers_before": 58}, "layers_before is 58; expected a number that leaves a multiple of 4"),
        (36, 2, {"layers_before": 3}, "layers_before is 3; expected a multiple of 2, their period"),
        (36, 2, {"repeats": 3}, r"a multiple of 24 of the 36 layers .*, stages 4 x repeats 3 x period 2"),
    ],
)
def test_layers_that_cannot_be_divided_are_refused(num_layers, period, options, message, all_devices):
    parallel = ParallelConfig(1, 2, stages=4, **options)
    with pytest.raises(ValueError, match=message):
        check_stages(parallel, make_mesh(parallel), num_layers, period)


@pytest.mark.slow
def test_bad_runs_are_refused_before_compiling(all_devices):
    parallel = ParallelConfig(1, 2, "eplb", stages=2)
    train = TrainConfig(model=CHECKPOINT, parallel=parallel, batch=BatchConfig(4, 12))
    with pytest.raises(
        ValueError, match=r"parallel\.system is 'eplb'; expected one without state between microbatches"
    ):
        make_programs(train, make_mesh(parallel), make_system(parallel), decoder_config("mixtral", 2))
    parallel = ParallelConfig(1, 2, "plain", stages=2)
    with pytest.raises(
        ValueError, match=r"parallel\.layers_before is 0; expected a number that leaves a multiple of 2"
    ):
        make_programs(train, make_mesh(parallel), make_system(parallel), decoder_config("mixtral", 3))
    programs = make_programs(train, make_mesh(parallel), make_system(parallel), decoder_config("mixtral", 2))
    with pytest.raises(
        ValueError, match="batch is 6; expected a multiple of microbatches 2 x 2, the devices of a stage"
    ):
        jax.eval_shape(programs.evaluate, programs.state_shapes, jax.ShapeDtypeStruct((6, 13), jnp.int32))


@pytest.mark.slow
def test_each_device_keeps_its_part_of_a_stage(all_devices):
    """With layers in blocks or before the pipeline, the stages split matrices instead of layers."""
    for repeats, spec in ((1, ("stage", "expert", "data", None)), (2, (None, "expert", ("data", "stage"), None))):
        parallel = ParallelConfig(2, 2, "plain", stages=2, repeats=repeats)
        train = TrainConfig(model=CHECKPOINT, parallel=parallel, batch=BatchConfig(8, 12))
        programs = make_programs(train, make_mesh(parallel), make_system(parallel), decoder_config("mixtral", 4))
        up = programs.state_shapes[0]["stacks"][0][0]["moe"]["up"].get_value()
        assert up.sharding.spec == PartitionSpec(*spec)
        for leaf in jax.tree.leaves(programs.state_shapes):
            assert leaf.size < 1024 or 8 * math.prod(leaf.sharding.shard_shape(leaf.shape)) == leaf.size
