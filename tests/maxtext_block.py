"""The block of `examples/maxtext_block.py` against MaxText's: outputs, gradients, and losses of MaxText's trainer.

Run `python -m tests.maxtext_block [--train]` in an environment with MaxText (see `benchmarks/peer_maxtext.py`; its
trainer also requires `tiktoken sentencepiece sympy ml_collections`).
"""

import argparse
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.tree_util import keystr
from maxtext.layers import moe
from maxtext.layers.initializers import nd_dense_init

from benchmarks.peer_maxtext import DENSE, maxtext_config
from benchmarks.skewed_layer import Sizes
from examples.maxtext_block import RoutedMoE
from jax_moe_lb import use_virtual_cpu_devices

SIZES = Sizes(num_ranks=8, num_tokens=64, width=32, inner=64, num_experts=16, per_tok=2)
GPT_OSS = {
    "mlp_bias": True,
    "routed_bias": True,
    "mlp_activations_limit": 7.0,
    "mlp_activations": ["sigmoid", "linear"],
}
DECODERS: dict[str, dict[str, object]] = {
    "mixtral": {"decoder_block": "mixtral"},
    "qwen3_moe": {"decoder_block": "qwen3_moe", "norm_topk_prob": True},
    "gpt_oss": {"decoder_block": "gpt_oss", **GPT_OSS},
}
MOST = 2e-5
"""Tolerance; both sum in float32, in different orders."""

RUN = """steps=30 learning_rate=0.01 dataset_type=synthetic enable_checkpointing=False hardware=cpu log_config=False
    skip_jax_distributed_system=True run_name=block decoder_block=mixtral base_emb_dim=64 base_moe_mlp_dim=128
    base_mlp_dim=128 num_experts=8 num_experts_per_tok=2 base_num_decoder_layers=2 base_num_query_heads=4
    base_num_kv_heads=4 head_dim=16 vocab_size=256 max_target_length=64 per_device_batch_size=1
    ici_expert_parallelism=4 ici_fsdp_parallelism=2 sparse_matmul=False dtype=float32 weight_dtype=float32
    matmul_precision=highest attention=dot_product enable_tensorboard=False"""


def noise_like(array: jax.Array) -> jax.Array:
    return jax.random.normal(jax.random.key(array.size), array.shape)


def block_of(make: Any, config: Any, mesh: Mesh) -> nnx.Module:
    init, axes = nd_dense_init(1.0, "fan_in", "truncated_normal"), ("embed", None)
    with jax.set_mesh(mesh), nnx.logical_axis_rules(config.logical_axis_rules):
        return make(
            config, SIZES.num_experts, SIZES.per_tok, mesh, init, axes, nnx.Rngs(0), intermediate_dim=SIZES.inner
        )


def differences(options: dict[str, object]) -> dict[str, float]:
    """Return the differences of outputs and gradients from MaxText's, relative to the largest of each."""
    config = maxtext_config(SIZES, DENSE | options)
    names = tuple(config.mesh_axes)
    shape = tuple(SIZES.num_ranks if name == "expert" else 1 for name in names)
    mesh = Mesh(np.array(jax.devices()[: SIZES.num_ranks]).reshape(shape), names)
    theirs, ours = (block_of(make, config, mesh) for make in (moe.RoutedMoE, RoutedMoE))
    arrays = nnx.to_pure_dict(nnx.state(theirs, nnx.Param))
    # Replace MaxText's zero biases by noise.
    arrays = jax.tree.map_with_path(
        lambda path, array: array + 0.5 * ("bias" in keystr(path)) * noise_like(array), arrays
    )
    x = jax.random.normal(jax.random.key(1), (SIZES.num_ranks, SIZES.num_tokens, SIZES.width))

    def outcome(block: nnx.Module) -> Any:
        graph, state, rest = nnx.split(block, nnx.Param, ...)
        nnx.replace_by_pure_dict(state, arrays)

        def loss(state: Any, x: jax.Array) -> Any:
            with nnx.logical_axis_rules(config.logical_axis_rules):
                y, *_ = nnx.merge(graph, state, rest, copy=True)(x)
            return jnp.square(y).mean(), y

        with jax.set_mesh(mesh):
            (of_state, of_x), y = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(state, x)
        return {"outputs": y, "gradients of inputs": of_x, **nnx.to_pure_dict(of_state)}

    found = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), outcome(ours), outcome(theirs))
    return {keystr(path): value for path, value in jax.tree.leaves_with_path(found)}


def losses_of_training(block: Any) -> list[str]:
    """Return the step lines of MaxText's trainer with this block in its decoder."""
    from maxtext.trainers.pre_train import train

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger, theirs = logging.getLogger("absl"), moe.RoutedMoE
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    moe.RoutedMoE = block
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    with tempfile.TemporaryDirectory() as folder:
        train.main(["", str(base), f"base_output_directory={folder}", *RUN.split()])
    moe.RoutedMoE = theirs
    logger.removeHandler(handler)
    return [line.split("loss: ")[1].split(",")[0] for line in said if "completed step" in line]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="Also train a small Mixtral with each block.")
    args = parser.parse_args()
    use_virtual_cpu_devices(SIZES.num_ranks)
    worst = 0.0
    for name, options in DECODERS.items():
        found = differences(options)
        worst = max(worst, *found.values())
        print(name, {part: f"{value:.0e}" for part, value in found.items()}, flush=True)
    if not args.train:
        return int(worst > MOST)
    ours, theirs = (losses_of_training(block) for block in (RoutedMoE, moe.RoutedMoE))
    print(f"losses: {', '.join(ours)}; MaxText's are {'the same' if ours == theirs else ', '.join(theirs)}")
    return int(worst > MOST or ours != theirs or not ours)


if __name__ == "__main__":
    sys.exit(main())
