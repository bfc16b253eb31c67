"""Adapters written by `save_adapters` are read by PEFT, with the logits of the merged model."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

from jax_moe_lb import System
from models.architectures.config_json import read_fields
from models.architectures.registry import configured
from models.config import LoraConfig, ParallelConfig
from models.decoder.layers import expert_rules
from models.decoder.model import Decoder
from models.decoder.stacked import StackedDecoder
from models.mesh import make_mesh
from models.pretrained.adapters import save_adapters, target_paths
from models.pretrained.saving import save_pretrained
from tests.marks import parametrize
from tests.parity.references import VOCAB, logits_of, make_model

ATTENTION = "q_proj,k_proj,v_proj,o_proj"
OTHERS = ("minimax_m2", "olmoe", "hunyuan_v1_moe", "flex_olmo", "dots1", "deepseek_v2", "ernie4_5_moe", "qwen3_next")
OTHERS += ("glm_moe_dsa", "glm4_moe_lite", "solar_open")


def adapted_model(folder, lora):
    """Return the model of a checkpoint's sizes, with random parameters and adapters."""
    config, mesh, rng = configured(read_fields(folder)), make_mesh(ParallelConfig(1, 1)), np.random.default_rng(0)

    def create():
        rules = expert_rules(mesh, config.num_experts)
        decoder = Decoder(config, mesh=mesh, system=System(), rules=rules, rngs=nnx.Rngs(0))
        return StackedDecoder(decoder, lora=lora, adapted=target_paths(config, lora.targets), rngs=nnx.Rngs(0))

    graph, shapes = nnx.split(nnx.eval_shape(create))
    values = [jnp.asarray(0.2 * rng.standard_normal(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(shapes)]
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(shapes), values))


@parametrize(
    "name, targets",
    [
        *[("mixtral", ATTENTION), ("mixtral", None), ("qwen3_moe", None), ("glm4_moe", None), ("deepseek_v3", None)],
        *[("gpt_oss", ATTENTION), ("qwen2_moe", ATTENTION)],
    ],
    ((name, None) for name in OTHERS),
)
def test_peft_reads_adapters(name, targets, tmp_path):
    # The run with an older transformers collects this file, too.
    from peft import PeftModel

    make_model(name).save_pretrained(tmp_path / "shape")
    lora = LoraConfig(rank=3, alpha=5.0, targets=targets)
    ours = adapted_model(tmp_path / "shape", lora)
    assert save_adapters(ours, tmp_path / "adapter", lora, str(tmp_path / "base"))
    save_pretrained(ours, tmp_path / "merged")
    zeros = nnx.state(ours)
    for path, variable in nnx.to_flat_state(zeros):
        if path[-1].endswith("_b"):
            variable.set_value(jnp.zeros_like(variable.get_value()))
    nnx.update(ours, zeros)
    save_pretrained(ours, tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    tokens = np.arange(24).reshape(2, 12) % (VOCAB - 1) + 1
    with torch.no_grad():
        found = theirs(torch.asarray(tokens)).logits.numpy()
    expected, plain = logits_of(tmp_path / "merged", tokens), logits_of(tmp_path / "base", tokens)
    assert np.abs(expected - plain).max() > 0.1
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
