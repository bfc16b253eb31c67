"""Layers in a loop are the layers one after the other, and narrow arithmetic trains as wide does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_moe_lb import Topology
from models.common import LanguageModel
from models.parallel import default_system, make_mesh
from models.presets import ModelConfig, ParallelConfig
from models.recording import RunFolder
from models.training import make_programs
from tests.models.small import CONFIG, run

pytestmark = pytest.mark.slow

PARALLEL = ParallelConfig(data_parallel=2, expert_parallel=2)
MODEL = ModelConfig(num_layers=2, embed_dim=16, num_heads=2, mlp_dim=8, num_experts=4)


def model_of(config):
    """Its balancers remember the loads of each layer."""
    mesh = make_mesh(PARALLEL)
    options = {"mesh": mesh, "topology": Topology.from_mesh(mesh), "system": default_system("eplb")}
    return LanguageModel(config, **options, rngs=nnx.Rngs(0))


def unrolled(model, tokens):
    x, per_layer = model.embed(tokens), []
    for block in model.blocks:
        x, stats = block(x)
        per_layer.append(stats)
    return model.head(model.norm(x)), jax.tree.map(lambda *leaves: jnp.stack(leaves), *per_layer)


def outcome(call, config):
    """Statistics, gradients of all parameters, and what the model remembers afterwards."""

    @nnx.jit
    def differentiated(model, tokens):
        def loss(model):
            logits, stats = call(model, tokens)
            return jnp.sin(logits).mean(), (logits, stats)

        gradients, (logits, stats) = nnx.grad(loss, has_aux=True)(model)
        return logits, stats, gradients, nnx.state(model, nnx.Not(nnx.Param))

    tokens = jax.random.randint(jax.random.key(1), (4, 8), 0, 256)
    return jax.device_get(differentiated(model_of(config), tokens))


@pytest.fixture(scope="module")
def reference(all_devices):
    return outcome(unrolled, MODEL)


@pytest.mark.parametrize("remat", [False, True])
def test_a_loop_equals_its_layers(reference, remat):
    got = outcome(LanguageModel.__call__, dataclasses.replace(MODEL, remat=remat))
    assert jax.tree.leaves(got[3])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, reference)


def test_bfloat16_learns_what_float32_does(trained_run, tmp_path):
    narrow = dataclasses.replace(CONFIG.model, compute_dtype="bfloat16", remat=True)
    run(dataclasses.replace(CONFIG, model=narrow), tmp_path)
    got, want = (np.array([row["loss"] for row in RunFolder(path).rows("step")]) for path in (tmp_path, trained_run))
    assert got[-1] < got[0] - 1
    np.testing.assert_allclose(got, want, rtol=0.02)


def test_parameters_and_optimizer_stay_wide():
    narrow = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, compute_dtype="bfloat16"))
    shapes = make_programs(narrow, make_mesh(narrow.parallel), default_system("plain")).state_shapes
    assert {leaf.dtype.name for leaf in jax.tree.leaves(shapes)} == {"float32", "int32", "uint32"}
