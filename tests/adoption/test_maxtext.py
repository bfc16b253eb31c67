import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from maxtext.configs import pyconfig
from maxtext.layers import moe
from maxtext.layers.initializers import nd_dense_init
from maxtext.layers.moe import RoutedMoE
from maxtext.trainers.pre_train import train
from maxtext.utils.model_creation_utils import from_config

import jax_moe_lb
from tests.adoption.comparison import SYSTEMS, assert_equal, outcome, paths, randomize

OPTIONS = {
    "run_name": "adoption",
    "enable_checkpointing": False,
    "skip_jax_distributed_system": True,
    "hardware": "cpu",
    "base_emb_dim": 32,
    "base_moe_mlp_dim": 48,
    "base_mlp_dim": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "base_num_decoder_layers": 2,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_target_length": 12,
    "per_device_batch_size": 1,
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
    "attention": "dot_product",
    "sparse_matmul": False,
}
DECODERS = {
    "mixtral": {"decoder_block": "mixtral", "load_balance_loss_weight": 0.01},
    "qwen3_moe": {"decoder_block": "qwen3_moe", "norm_topk_prob": True},
    "gpt_oss": {
        "decoder_block": "gpt_oss",
        "mlp_bias": True,
        "routed_bias": True,
        "mlp_activations_limit": 7.0,
        "mlp_activations": ["sigmoid", "linear"],
    },
    "deepseek": {
        "decoder_block": "deepseek",
        "model_name": "deepseek3-test",
        "override_model_config": True,
        "routed_bias": True,
        "routed_bias_update_rate": 0.001,
        "routed_score_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "n_routing_groups": 4,
        "topk_routing_group": 2,
        "load_balance_loss_weight": 0.01,
    },
    "llama4": {"decoder_block": "llama4", "num_experts_per_tok": 1},
}
AXES = {"expert": 4, "fsdp": 2}


def config(options, **axes):
    sizes = {f"ici_{name}_parallelism": size for name, size in (axes or AXES).items()}
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    sizes = {"ici_fsdp_parallelism": 1} | sizes
    return pyconfig.initialize([None, str(base)], **OPTIONS | sizes | options)


def mesh_of(settings):
    names = tuple(settings.mesh_axes)
    shape = [getattr(settings, f"ici_{name}_parallelism", 1) for name in names]
    return Mesh(np.array(jax.devices()).reshape(shape), names)


def block_of(settings, mesh):
    with jax.set_mesh(mesh), nnx.logical_axis_rules(settings.logical_axis_rules):
        block = RoutedMoE(
            settings,
            settings.num_experts,
            settings.num_experts_per_tok,
            mesh,
            nd_dense_init(1.0, "fan_in", "truncated_normal"),
            ("embed", None),
            nnx.Rngs(0),
            intermediate_dim=settings.moe_mlp_dim,
        )
    return randomize(block)


def inside(settings, mesh, function):
    def call(*args):
        with nnx.logical_axis_rules(settings.logical_axis_rules):
            return function(*args)

    def run(*args):
        with jax.set_mesh(mesh):
            return outcome(args[0], call, *args[1:])

    return run


def compare(settings, system, function, *arrays, title):
    mesh = mesh_of(settings)
    run = inside(settings, mesh, function)
    expected = run(block_of(settings, mesh), *arrays)
    block = block_of(settings, mesh)
    before = paths(block)
    assert jax_moe_lb.balance(block, mesh=mesh, system=system) is block
    assert paths(block) == before
    assert type(block).__name__ == "RoutedMoE"
    assert_equal(run(block, *arrays), expected, title)


X = jax.random.normal(jax.random.key(1), (8, 12, 32))


@pytest.mark.parametrize(
    ("decoder", "system"),
    [*(("mixtral", system) for system in SYSTEMS), *((name, "greedy") for name in DECODERS if name != "mixtral")],
)
def test_outputs_losses_and_gradients_equal_maxtext(decoder, system):
    compare(config(DECODERS[decoder]), system, lambda block, x: block(x), X, title=f"maxtext {decoder} {system}")


def test_tensor_parallel_experts():
    settings = config(DECODERS["gpt_oss"], expert=4, tensor=2)
    compare(settings, "greedy", lambda block, x: block(x), X, title="maxtext gpt_oss, tensor axis")


def test_forced_routed_experts():
    forced = jax.random.randint(jax.random.key(2), (8, 12, 2), -1, 8)
    # Distinct experts of a token.
    forced = forced.at[..., 1].set(jnp.where(forced[..., 0] == forced[..., 1], -1, forced[..., 1]))
    for decoder in ("mixtral", "qwen3_moe"):
        compare(
            config(DECODERS[decoder]),
            "greedy",
            lambda block, x, forced: block(x, forced_routed_experts=forced),
            X,
            forced,
            title=f"maxtext {decoder}, forced_routed_experts",
        )


@pytest.mark.parametrize("scan_layers", [False, True], ids=["layers", "scanned"])
def test_a_model_equals_maxtext(scan_layers):
    settings = config(DECODERS["qwen3_moe"] | {"scan_layers": scan_layers})
    mesh = mesh_of(settings)
    tokens = jax.random.randint(jax.random.key(3), (8, 12), 0, 64)
    positions = jnp.broadcast_to(jnp.arange(12), tokens.shape)

    def model_of():
        with jax.set_mesh(mesh), nnx.logical_axis_rules(settings.logical_axis_rules):
            return randomize(from_config(settings, mesh=mesh, rngs=nnx.Rngs(params=0, dropout=1)))

    def logits(model, tokens, positions):
        return model(tokens, positions, decoder_segment_ids=jnp.ones_like(tokens), enable_dropout=False)

    run = inside(settings, mesh, logits)
    expected = run(model_of(), tokens, positions)
    model = model_of()
    before = paths(model)
    jax_moe_lb.balance(model, mesh=mesh, system="greedy")
    assert paths(model) == before
    assert any(hasattr(module, "balance_config") for _, module in nnx.iter_modules(model))
    assert_equal(run(model, tokens, positions), expected, f"maxtext model, scan_layers={scan_layers}")


class BalancedMoE(RoutedMoE):
    """Block that is balanced at its construction, as the trainer builds its model itself."""

    num_built = 0

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        jax_moe_lb.balance(self, mesh=self.mesh)
        BalancedMoE.num_built += 1


def training_losses(folder, caplog):
    """Return the printed losses of 30 steps of MaxText's trainer."""
    options = OPTIONS | DECODERS["mixtral"] | {"base_output_directory": folder, "max_target_length": 64}
    options |= {f"ici_{name}_parallelism": size for name, size in AXES.items()}
    options |= {"steps": 30, "learning_rate": 0.01, "dataset_type": "synthetic", "enable_tensorboard": False}
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="absl"):
        train.main(["", str(base), *(f"{name}={value}" for name, value in options.items())])
    lines = [line for line in caplog.messages if "completed step" in line]
    return [line.split("loss: ")[1].split(",")[0] for line in lines]


def test_training_equals_maxtext(tmp_path, caplog, monkeypatch):
    expected = training_losses(tmp_path, caplog)
    monkeypatch.setattr(moe, "RoutedMoE", BalancedMoE)
    found = training_losses(tmp_path, caplog)
    assert BalancedMoE.num_built > 0
    assert len(found) == 30
    assert found == expected
    assert float(found[-1]) < float(found[0]) / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity_factor": 1.25}, r"model\.config\.capacity_factor is 1\.25; expected -1"),
        ({"shard_mode": "explicit"}, "shard_mode|Explicit"),
    ],
)
def test_unsupported_features_are_refused_by_name(options, message):
    settings = config(DECODERS["mixtral"] | options)
    mesh = mesh_of(settings)
    with pytest.raises(ValueError, match=message):
        jax_moe_lb.balance(block_of(settings, mesh), mesh=mesh)


def test_another_mesh_is_refused():
    settings = config(DECODERS["mixtral"])
    other = mesh_of(config(DECODERS["mixtral"], expert=8))
    with pytest.raises(ValueError, match=r"expected model\.mesh"):
        jax_moe_lb.balance(block_of(settings, mesh_of(settings)), mesh=other)
