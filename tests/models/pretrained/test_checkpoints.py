"""Checkpoints: exact round trips, loading tensor by tensor, and errors for damaged files."""

import json
import re

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from benchmarks.training.loading import load_in, write_checkpoint
from jax_moe_lb import relocate
from jax_moe_lb.layer.systems import system_named
from models import generate
from models.architectures.published import PUBLISHED, num_params, published_config
from models.config import ParallelConfig
from models.mesh import make_mesh
from models.pretrained.loading import by_path, from_pretrained
from models.pretrained.safetensors import read_header
from models.pretrained.saving import SUMMED_WORDS, save_pretrained, write_tensors
from models.tiny_checkpoint import tiny_config, write_tiny
from tests.models.small import are_equal, refusal, tensors_in

NAME = "model.layers.1.block_sparse_moe.experts.3.w1.weight"


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtral") / "tiny"
    write_tiny("mixtral", folder)
    return folder


def mesh(data_parallel=2, expert_parallel=4):
    return make_mesh(ParallelConfig(data_parallel, expert_parallel))


def copied(folder, to, change=lambda tensors: None, config=lambda raw: None):
    """Copy a checkpoint with changes."""
    to.mkdir()
    tensors, raw = tensors_in(folder), json.loads((folder / "config.json").read_text())
    change(tensors), config(raw)
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_text(json.dumps(raw))
    return to


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_a_round_trip_keeps_every_bit(name, tmp_path):
    write_tiny(name, tmp_path / "tiny")
    save_pretrained(from_pretrained(tmp_path / "tiny", mesh()), tmp_path / "out")
    assert are_equal(tensors_in(tmp_path / "tiny"), tensors_in(tmp_path / "out"))
    architecture = json.loads((tmp_path / "out" / "config.json").read_text())["architectures"][0]
    assert (tmp_path / "out" / "README.md").read_text().startswith(f"# {architecture}\n")


@pytest.mark.slow
def test_bfloat16_in_several_files(mixtral, tmp_path):
    def narrow(tensors):
        tensors |= {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}

    source = copied(mixtral, tmp_path / "narrow", narrow)
    model = from_pretrained(source, mesh(1, 8), compute_dtype="bfloat16", param_dtype="bfloat16")
    save_pretrained(model, tmp_path / "out", max_file_bytes=100_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 5
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert are_equal(tensors_in(source), {name: value for file in files for name, value in load_file(file).items()})
    again = from_pretrained(tmp_path / "out", mesh(), param_dtype="bfloat16")
    assert are_equal(*(by_path(nnx.state(loaded, nnx.Param)) for loaded in (again, model)))


def test_tensors_of_several_dtypes_are_aligned_in_a_file(tmp_path):
    dtypes = {"a": ml_dtypes.bfloat16, "b": np.float32, "c": np.int8, "d": np.float64}
    tensors = {name: np.arange(3 * i, dtype=dtype).reshape(3, i) for i, (name, dtype) in enumerate(dtypes.items())}
    tensors["e"] = np.array(1.5, np.float32)
    shapes = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in tensors.items()}
    write_tensors(tmp_path, shapes, tensors.values())
    assert are_equal(tensors_in(tmp_path), tensors)
    header = read_header(tmp_path / "model.safetensors")
    assert all(start % tensors[name].itemsize == 0 for name, start in header.starts.items())


LARGE = {"hidden_size": 1024, "intermediate_size": 3072, "num_local_experts": 4, "vocab_size": 3072}


@pytest.mark.thorough
def test_loading_and_saving_hold_at_most_two_tensors_besides_the_parameters(tmp_path, monkeypatch):
    """Two processes with two devices each load a checkpoint of 316 MB, and write it back.

    A stack of four experts on a device exceeds the bound.
    """
    # By default, glibc keeps freed blocks of up to 32 MB.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**17))
    text = json.dumps(json.loads(tiny_config("mixtral")) | LARGE | {"num_hidden_layers": 4})
    sizes = write_checkpoint(tmp_path, text)
    found = load_in(tmp_path, 2, repetitions=2)
    print(f"{found}, largest tensor {max(sizes.values())}")
    # Some dimensions of attention are too small to be split.
    shards = [one["parameters"] for one in found]
    assert sum(shards) == pytest.approx(sum(sizes.values()), rel=0.01)
    two = 2 * max(sizes.values())
    for one in found:
        assert one["load_bytes"] <= one["parameters"] + two + 2**22
        # Both devices hold one block to exchange, before and after.
        assert one["save_bytes"] <= two + 4 * 4 * SUMMED_WORDS + 2**22
    assert are_equal(tensors_in(tmp_path), tensors_in(tmp_path / "saved"))


@pytest.mark.slow
def test_experts_that_have_moved_are_saved_under_their_names(mixtral, tmp_path):
    model = from_pretrained(mixtral, mesh(), system_named("two_tier"))
    order = np.stack([np.roll(np.arange(16), 3), np.arange(16)[::-1]])
    params, _ = relocate(nnx.state(model), (), order)
    nnx.update(model, params)
    assert model.blocks[0].moe.homes[0] == 3
    save_pretrained(model, tmp_path / "out")
    assert are_equal(tensors_in(mixtral), tensors_in(tmp_path / "out"))


def header_of(**entries):
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
# The package `safetensors` refuses further ones.
HOSTILE = {
    "header longer than the file": ((10**9).to_bytes(8, "little") + b"{}", "header has 1000000000 bytes"),
    "header of 2^63 bytes": (b"\xff" * 8 + b"{}", "the header has"),
    "no header": (b"\x01", "the header has"),
    "nested": ((200_000).to_bytes(8, "little") + b"[" * 200_000, "invalid JSON in header"),
    "overlap": (header_of(a=ONE, b=ONE) + bytes(8), "invalid offset for tensor `"),
    "gap": (header_of(a=ONE | {"data_offsets": [8, 16]}) + bytes(16), "invalid offset for tensor `a`"),
    "truncated": (header_of(a=ONE) + bytes(4), "incomplete metadata, file not fully covered"),
    "more than tensors": (header_of(a=ONE) + bytes(9), "incomplete metadata, file not fully covered"),
    "absurd shape": (header_of(a=ONE | {"shape": [2**40, 2**40]}) + bytes(8), "overflow computing buffer size"),
    "sizes of many digits": (header_of(a=ONE | {"shape": [2**62] * 99}) + bytes(8), "overflow computing buffer size"),
    "long name": (header_of(**{"n" * 10**6: ONE}), "incomplete metadata, file not fully covered"),
    "unknown dtype": (header_of(a=ONE | {"dtype": "F8_E5M2", "shape": [8]}) + bytes(8), "a has dtype 'F8_E5M2'"),
    "long dtype": (header_of(a=ONE | {"dtype": "F" * 10**6}) + bytes(8), "invalid JSON in header: unknown variant"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(case, tmp_path):
    content, expected = HOSTILE[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors") as caught:
        read_header(tmp_path / "model.safetensors")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(tmp_path)) + 200


EXTRA = "model.layers.9.mlp.weight"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.pop(NAME), f"missing: {NAME};"),
        (lambda t: t.update({EXTRA: np.zeros(2, np.float32)}), f"not of this model: {EXTRA};"),
        (lambda t: t.update({NAME: np.zeros((3, 5), np.float32)}), f"{NAME} has shape [3, 5]; expected [64, 64]"),
        (lambda t: t.update({NAME: t[NAME].astype(np.int32)}), f"{NAME} has dtype I32"),
    ],
)
def test_tensors_that_do_not_fit_are_named(mixtral, tmp_path, change, expected):
    folder = copied(mixtral, tmp_path / "bad", change)
    with pytest.raises(ValueError, match=f"bad.*{re.escape(expected)}"):
        from_pretrained(folder, mesh())


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ({"a": "../model.safetensors"}, "outside the folder"),
        ({"a": "/etc/passwd"}, "outside the folder"),
        ({"a": ".."}, "outside the folder"),
        ({"a": "none.safetensors"}, "'none.safetensors' is missing"),
        ({"a": "model.safetensors"}, "a is not in 'model.safetensors'"),
        ({"a": 3}, "weight_map is {'a': 3}; expected an object"),
        ([], "weight_map is []; expected an object"),
    ],
)
def test_an_index_that_lies(mixtral, tmp_path, places, expected):
    folder = copied(mixtral, tmp_path / "bad")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ValueError, match=rf"index\.json.*{re.escape(expected)}"):
        from_pretrained(folder, mesh())


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("model_type", "mamba2", "model_type is 'mamba2'; expected one of"),
        ("model_type", "llama4", "text_config is None; expected an object of llama4_text"),
        ("hidden_size", "64", "hidden_size is '64'; expected an integer, 0 to"),
        ("num_key_value_heads", 3, "num_kv_heads is 3; expected a divisor"),
        ("rope_scaling", {"rope_type": "longrope"}, "rope_type is 'longrope'"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'; expected 'silu'"),
        ("num_local_experts", 8, "not of this model"),
        ("num_hidden_layers", 10**12, "num_hidden_layers is 1000000000000; expected an integer, 0 to 1024"),
        ("model_type", "qwen3_moe", "moe_intermediate_size is None"),
        ("num_local_experts", -1, "num_local_experts is -1"),
    ],
)
def test_configs_that_are_not_supported(mixtral, tmp_path, field, value, expected):
    folder = copied(mixtral, tmp_path / "bad", config=lambda raw: raw.update({field: value}))
    with pytest.raises(ValueError, match=re.escape(expected)):
        from_pretrained(folder, mesh())


def test_no_pickle_is_read(mixtral, tmp_path):
    folder = copied(mixtral, tmp_path / "bad")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"expected model\.safetensors"):
        from_pretrained(folder, mesh())


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "none"])
def test_a_checkpoint_is_written_in_floats_alone(mixtral, tmp_path, dtype):
    with pytest.raises((TypeError, ValueError), match=rf"dtype is '?{dtype}'?; expected float64, float32"):
        save_pretrained(from_pretrained(mixtral, mesh()), tmp_path / "out", dtype=dtype)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_folder_with_something_in_it_is_not_written_to(mixtral):
    model, before = from_pretrained(mixtral, mesh()), sorted(mixtral.iterdir())
    with pytest.raises(ValueError, match="is not empty"):
        save_pretrained(model, mixtral)
    assert sorted(mixtral.iterdir()) == before


@pytest.mark.thorough
def test_generating_from_the_command_line(mixtral, tmp_path):
    trace = tmp_path / "counts.npz"
    options = ["--checkpoint", str(mixtral), "--prompt", "abc", "--prompt", "defghij", "--max-new-tokens", "3"]
    options += ["--temperature", "1", "--top-p", "0.9", "--system", "plain", "--record-counts", str(trace)]
    result = CliRunner().invoke(generate.app, options)
    assert result.exit_code == 0, result.output
    assert "abc" in result.output
    assert "defghij" in result.output
    counts = np.load(trace)["counts"]
    assert counts.shape == (3, 2, 8, 16)
    # Padding is not routed: 3 + 7 prompt tokens, then one token of each, with two experts.
    assert counts.sum((2, 3)).tolist() == [[20, 20], [4, 4], [4, 4]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--checkpoint", "nowhere"], "tokenizer.json cannot be read"),
        (["--expert-parallel", "3"], "num_experts is 16; expected a positive multiple of the 3 ranks"),
        (["--dtype", "int8"], "compute_dtype is 'int8'"),
        (["--system", "best"], "system is 'best'"),
        (["--prompt", ""], "prompt has no tokens"),
        (["--top-p", "0"], "top_p is 0.0"),
        (["--repetition-penalty", "0"], "repetition_penalty is 0.0"),
        (["--stream", "--prompt", "b"], "stream is set with 2 prompts; expected one"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--temperature", "1e-38"], "temperature is 1e-38; expected 1e-30 to 1e+30"),
        (["--stop", ""], "stop is ''; expected a text that is not empty"),
    ],
)
def test_what_generate_refuses_is_one_line(mixtral, options, expected):
    assert expected in refusal(generate.app, "--checkpoint", mixtral, "--prompt", "a", *options)


@pytest.mark.slow
def test_published_sizes():
    """In billions: total and active parameters, with embedding and output."""
    counted = {name: num_params(published_config(name)) for name in PUBLISHED}
    found = {name: (round(total / 1e9, 1), round(active / 1e9, 1)) for name, (total, active) in counted.items()}
    assert found == {
        "Mixtral-8x7B": (46.7, 12.9),
        "Qwen3-30B-A3B": (30.5, 3.4),
        "DeepSeek-V3": (671.0, 37.6),
        "GLM-4.5": (352.8, 33.6),
        "gpt-oss-120b": (116.8, 5.7),
        "gpt-oss-20b": (20.9, 4.2),
        "Hunyuan-A13B": (80.4, 12.7),
        "Llama-4-Scout": (107.8, 17.2),
        "Qwen3-Next-80B-A3B": (79.7, 3.9),
        "Qwen3.5-35B-A3B": (34.7, 3.5),
        "GLM-5": (743.9, 41.8),
    }
