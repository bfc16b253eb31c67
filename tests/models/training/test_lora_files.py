"""Files of a run with adapters: those of PEFT, and checkpoints without the frozen parameters."""

import json
import re

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jax_moe_lb import plain
from models.config import TUNING, LoraConfig, ParallelConfig
from models.decoder.layers import Adapter
from models.mesh import make_mesh
from models.pretrained.adapters import EXPERTS, save_adapters, target_paths
from models.pretrained.safetensors import TensorFolder
from models.run_folder.checkpoints import BASE, parts, steps_in
from models.settings import updated
from models.training.step import make_programs
from tests.models.decoder.test_pipeline import decoder_config
from tests.models.small import sets
from tests.models.training.test_tuning import checkpoint, losses, tuned

__all__ = ["checkpoint"]
LORA = ["--mesh", "expert=2", *sets("lora.rank=2", "lora.alpha=8")]


def merged(base, folder):
    """Return the tensors of a checkpoint with the adapters of PEFT's files."""
    config = json.loads((folder / "adapter_config.json").read_text())
    adapters, tensors = load_file(folder / "adapter_model.safetensors"), dict(base)
    modules = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in adapters}
    # PEFT matches the whole name of a module.
    every = {name.removesuffix(".weight") for name in base}
    assert modules == {name for name in every if re.fullmatch(config["target_modules"], name)}
    for name in modules:
        a, b = (adapters[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        assert a.shape[0] == b.shape[1] == config["r"]
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] + config["lora_alpha"] / config["r"] * b @ a
    return tensors, config, modules


@pytest.mark.slow
def test_a_run_writes_its_adapters_and_resumes_from_them(checkpoint):
    folder, _ = tuned(checkpoint, "run", *LORA, "--steps", 3, "--set", "lora.targets=q_proj,w1,w2,w3")
    base = load_file(checkpoint / "model.safetensors")
    tensors, config, modules = merged(base, folder.adapter)
    assert {name.rpartition(".")[2] for name in modules} == {"q_proj", "w1", "w2", "w3"}
    assert config["base_model_name_or_path"] == str(checkpoint)
    after = load_file(folder.model / "model.safetensors")
    for name, value in after.items():
        np.testing.assert_allclose(value, tensors[name], atol=1e-6, err_msg=name)
    changed = {name for name, value in base.items() if not np.array_equal(value, after[name])}
    assert changed == {f"{name}.weight" for name in modules}
    saved = json.loads((folder.checkpoints / "3" / "run" / "metadata").read_text())
    assert saved["base"] == str(checkpoint)
    fingerprint = TensorFolder(checkpoint).fingerprint
    assert json.loads(folder.config.read_text())["base_fingerprint"] == fingerprint
    names = (folder.checkpoints / "3" / "state" / "_METADATA").read_text()
    assert "kernel_a" in names
    assert "embedding" not in names
    tuned(checkpoint, "run", *LORA, "--steps", 6, "--set", "lora.targets=q_proj,w1,w2,w3", "--resume")
    straight, _ = tuned(checkpoint, "straight", *LORA, "--steps", 6, "--set", "lora.targets=q_proj,w1,w2,w3")
    assert losses(folder) == losses(straight)
    assert steps_in(folder.checkpoints) == [6, 3]


def test_a_state_with_adapters_leaves_its_frozen_parameters_out():
    frozen, adapter = nnx.Param(np.ones(2)), Adapter(np.ones(3))
    with_adapters = nnx.State({"kernel": frozen, "kernel_a": adapter, "count": nnx.Variable(np.ones(1))})
    assert {item: sorted(part) for item, part in parts(with_adapters).items() if part} == {
        "state": ["count.value", "kernel_a.value"],
        BASE: ["kernel.value"],
    }
    assert sorted(parts(nnx.State({"kernel": frozen}))["state"]) == ["kernel.value"]


@pytest.mark.parametrize(
    ("name", "targets", "paths"),
    [
        ("mixtral", "q_proj,v_proj", {"attention.q.kernel", "attention.v.kernel"}),
        ("mixtral", "w1,w2,w3", EXPERTS),
        ("gpt_oss", "gate_up_proj,down_proj", EXPERTS),
        ("deepseek_v3", "kv_b_proj", {"attention.kv_up.kernel"}),
        ("qwen3_moe", None, EXPERTS | {f"attention.{name}.kernel" for name in ("q", "k", "v", "out")}),
    ],
)
def test_targets_are_names_of_modules(name, targets, paths):
    assert target_paths(decoder_config(name, 2), targets) == paths


def test_an_unknown_target_is_refused():
    expected = r"lora\.targets has 'router'; expected names out of k_proj, o_proj, q_proj, v_proj, w1, w2, w3"
    with pytest.raises(ValueError, match=expected):
        target_paths(decoder_config("mixtral", 1), "q_proj,router")
    with pytest.raises(ValueError, match="targets is 'w1,w2'; expected all or none of w1, w2, w3, the experts'"):
        target_paths(decoder_config("mixtral", 1), "w1,w2")
    with pytest.raises(ValueError, match=r"targets is 'q_proj' with rank 0; expected None\. Set lora\.rank"):
        LoraConfig(targets="q_proj")


def test_a_rank_above_the_width_is_refused():
    parallel = ParallelConfig(1, 1, "plain")
    given = {"model": {"checkpoint": "tiny"}, "parallel": {"expert_parallel": 1, "system": "plain"}}
    config, sizes = updated(TUNING, given | {"lora": {"rank": 2**40}}), decoder_config("mixtral", 1)
    with pytest.raises(ValueError, match=rf"lora.rank is {2**40}; expected at most {sizes.embed_dim}, the width"):
        make_programs(config, make_mesh(parallel), plain(), sizes)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen2_moe"])
@pytest.mark.parametrize(("targets", "is_written"), [(None, False), ("q_proj", True)])
def test_experts_that_peft_does_not_read_have_no_file(name, targets, is_written, tmp_path):
    """Those in one tensor, and those that PEFT would ignore."""
    lora, parallel = LoraConfig(rank=2, targets=targets), ParallelConfig(1, 1, "plain")
    given = {"model": {"checkpoint": "tiny"}, "parallel": {"data_parallel": 1, "expert_parallel": 1, "system": "plain"}}
    config = updated(TUNING, given | {"lora": {"rank": 2, "targets": targets}})
    programs = make_programs(config, make_mesh(parallel), plain(), decoder_config(name, 1))
    assert save_adapters(programs.model(programs.init()), tmp_path / "adapter", lora, "base") == is_written
    assert (tmp_path / "adapter").exists() == is_written
