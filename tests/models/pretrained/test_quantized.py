"""Quantized weights equal the floats of a plain conversion, in full or in part."""

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.architectures.config_json import Fields, read_fields
from models.architectures.registry import configured, pieces_of
from models.config import ParallelConfig
from models.mesh import make_mesh
from models.pretrained.loading import from_pretrained
from models.pretrained.quantized import CheckpointWeights
from models.pretrained.safetensors import TensorFolder
from models.pretrained.saving import save_pretrained
from models.tiny_checkpoint import write_tiny

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 40]}
"""Blocks that do not divide the tiny matrices, as 128 does not divide all published ones."""
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
BITS = [0.0, 0.5, 1, 1.5, 2, 3, 4, 6]


def linear_maps(tensors):
    return [name for name in tensors if ".layers." in name and tensors[name].ndim == 2 and ".gate." not in name]


def in_fp8(tensors, rng):
    """Quantize the linear maps of layers; return the dequantized weights from plain loops."""
    floats = dict(tensors)
    for name in linear_maps(tensors):
        bits = rng.standard_normal(tensors[name].shape, np.float32).astype(ml_dtypes.float8_e4m3fn)
        rows, columns = bits.shape
        scales = rng.uniform(0.01, 0.1, (-(-rows // 24), -(-columns // 40))).astype(np.float32)
        tensors[name], tensors[name + "_scale_inv"] = bits, scales
        floats[name] = np.empty(bits.shape, np.float32)
        for i, j in np.ndindex(bits.shape):
            floats[name][i, j] = np.float32(bits[i, j]) * scales[i // 24, j // 40]
    return floats


def in_mxfp4(tensors, rng):
    """Quantize the experts; return the dequantized weights from plain loops: `[E, rows, columns]`, bytes along the
    rows.
    """
    floats = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (experts, columns, rows // 32, 16), np.uint8)
        scales = rng.integers(120, 134, blocks.shape[:-1], np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        floats[name] = np.empty((experts, rows, columns), np.float32)
        for e, c, group, byte in np.ndindex(blocks.shape):
            for half, bits in enumerate((blocks[e, c, group, byte] % 16, blocks[e, c, group, byte] // 16)):
                value = BITS[bits % 8] * (-1 if bits >= 8 else 1) * 2.0 ** (int(scales[e, c, group]) - 127)
                floats[name][e, group * 32 + byte * 2 + half, c] = value
    return floats


def in_channels(tensors, rng):
    """Quantize as GLM-4.5-FP8: a scale per row; return the dequantized weights from plain loops."""
    floats = dict(tensors)
    for name in linear_maps(tensors):
        bits = rng.standard_normal(tensors[name].shape, np.float32).astype(ml_dtypes.float8_e4m3fn)
        scales = rng.uniform(0.01, 0.1, (len(bits), 1)).astype(ml_dtypes.bfloat16)
        tensors |= {name: bits, f"{name}_scale": scales}
        floats[name] = np.array([[np.float32(x) * np.float32(scales[i, 0]) for x in bits[i]] for i in range(len(bits))])
    return floats


def in_integers(tensors, rng):
    """Quantize as Kimi-K2-Thinking: eight integers in a word; return the dequantized weights from plain loops."""
    floats = dict(tensors)
    for name in linear_maps(tensors):
        rows, columns = tensors.pop(name).shape
        integers = rng.integers(-8, 8, (rows, columns))
        scales = rng.uniform(0.01, 0.1, (rows, columns // 16)).astype(ml_dtypes.bfloat16)
        words = np.zeros((rows, columns // 8), np.uint32)
        floats[name] = np.empty((rows, columns), np.float32)
        for i, j in np.ndindex(rows, columns):
            words[i, j // 8] |= np.uint32((int(integers[i, j]) + 8) << 4 * (j % 8))
            floats[name][i, j] = np.float32(integers[i, j]) * np.float32(scales[i, j // 16])
        tensors |= {f"{name}_packed": words.view(np.int32), f"{name}_scale": scales}
        tensors[f"{name}_shape"] = np.array([rows, columns], np.int32)
    return floats


def compressed(kind, **weights):
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "output_activations": None}
    method = {"quant_method": "compressed-tensors", "format": kind}
    return method | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}


CHANNELS = compressed("float-quantized", num_bits=8, type="float", strategy="channel", group_size=None)
NUMBERS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
INTEGERS = compressed("pack-quantized", **NUMBERS)
CASES = {"deepseek_v3": (in_fp8, FP8), "gpt_oss": (in_mxfp4, MXFP4)}
CASES |= {"glm4_moe": (in_channels, CHANNELS), "kimi_k2": (in_integers, INTEGERS)}


def write(folder, tensors, config, settings):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    settings = {} if settings is None else {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config | settings))


@pytest.fixture(scope="module", params=CASES)
def folders(request, tmp_path_factory, all_devices) -> tuple[Path, Path]:
    """Return a quantized checkpoint, and the same checkpoint in floats."""
    folder = tmp_path_factory.mktemp(request.param)
    write_tiny(request.param, folder / "tiny")
    quantize, settings = CASES[request.param]
    tensors, config = load_file(folder / "tiny" / "model.safetensors"), read_fields(folder / "tiny").raw
    floats = quantize(tensors, np.random.default_rng(0))
    assert len(tensors) > len(floats)
    write(folder / "bits", tensors, config, settings)
    write(folder / "floats", floats, config, None)
    return folder / "bits", folder / "floats"


@pytest.mark.slow
def test_every_part_that_a_model_reads_is_exact(folders):
    bits, floats = folders
    pieces = pieces_of(configured(read_fields(bits)))
    weights, expected = (CheckpointWeights(TensorFolder(folder), read_fields(folder)) for folder in (bits, floats))
    assert weights.shapes == expected.shapes
    assert len(weights.quantized) > 3
    for piece in pieces:
        read = weights.read(piece.name, piece.index)
        assert np.array_equal(read, expected.read(piece.name, piece.index)), piece


@pytest.mark.slow
def test_what_is_read_in_bits_is_saved_as_floats(folders, tmp_path):
    mesh = make_mesh(ParallelConfig(2, 4))
    for folder, out in zip(folders, ("bits", "floats"), strict=True):
        save_pretrained(from_pretrained(folder, mesh, param_dtype="bfloat16"), tmp_path / out)
    ours, theirs = (load_file(tmp_path / out / "model.safetensors") for out in ("bits", "floats"))
    assert ours.keys() == theirs.keys()
    assert {value.dtype for name, value in ours.items() if "bias" not in name} == {np.dtype(ml_dtypes.bfloat16)}
    assert all(value.tobytes() == theirs[name].tobytes() for name, value in ours.items())
    written = json.loads((tmp_path / "bits" / "config.json").read_text())
    assert written["dtype"] == "bfloat16"
    assert "quantization_config" not in written


FP8_NAME, SCALES = "model.layers.1.self_attn.o_proj.weight", "model.layers.1.self_attn.o_proj.weight_scale_inv"
PACKED, SCALE, SHAPE = (f"{FP8_NAME}_{part}" for part in ("packed", "scale", "shape"))
BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"
FP4_SCALES = "model.layers.1.mlp.experts.down_proj_scales"


@pytest.mark.parametrize(
    ("folders", "change", "expected"),
    [
        ("deepseek_v3", lambda t: t.pop(SCALES), f"{FP8_NAME} has no scales; expected {SCALES} [3, 2]"),
        ("deepseek_v3", lambda t: t.update({SCALES: t[SCALES][:1]}), f"{SCALES} is F32 [1, 2]; expected"),
        ("deepseek_v3", lambda t: t.update({SCALES: t[SCALES].astype(np.int32)}), f"{SCALES} is I32 [3, 2]; expected"),
        ("deepseek_v3", lambda t: t.update({FP8_NAME: t[FP8_NAME][None]}), f"{FP8_NAME} has shape [1, 64, 64]"),
        ("deepseek_v3", lambda t: t.pop(FP8_NAME), f"missing: {FP8_NAME}"),
        ("deepseek_v3", lambda t: t.update({FP8_NAME: t[FP8_NAME][:20], SCALES: t[SCALES][:1]}), "has shape [20, 64]"),
        ("deepseek_v3", lambda t: t.update({SCALES: t[SCALES] * np.nan}), f"{SCALES} has a scale nan; expected finite"),
        ("glm4_moe", lambda t: t.pop(SCALE), f"{FP8_NAME} has no scales; expected {SCALE} [64, 1]"),
        ("kimi_k2", lambda t: t.update({SCALE: t[SCALE] * np.inf}), f"{SCALE} has a scale inf; expected finite scales"),
        ("kimi_k2", lambda t: t.pop(SCALE), f"_packed has no scales; expected {SCALE} [64, 4]"),
        ("kimi_k2", lambda t: t.pop(PACKED), f"missing: {FP8_NAME}"),
        ("kimi_k2", lambda t: t.update({PACKED: t[PACKED].astype(np.int64)}), f"{PACKED} is I64 [64, 8]; expected a"),
        ("kimi_k2", lambda t: t.update({SHAPE: np.array([64, 63])}), f"{SHAPE} is [64, 63]; expected 64 columns"),
        ("gpt_oss", lambda t: t.pop(FP4_SCALES), f"{BLOCKS} has no scales; expected {FP4_SCALES} [16, 64, 2]"),
        ("gpt_oss", lambda t: t.update({FP4_SCALES: t[FP4_SCALES][1:]}), f"{FP4_SCALES} is U8 [15, 64, 2]; expected"),
        ("gpt_oss", lambda t: t.update({BLOCKS: t[BLOCKS][..., :8]}), f"{BLOCKS} is U8 [16, 64, 2, 8]; expected"),
        ("gpt_oss", lambda t: t.update({BLOCKS: t[BLOCKS].astype(np.int8)}), f"{BLOCKS} is I8"),
        ("gpt_oss", lambda t: t.update({BLOCKS[:-7]: np.zeros(2, np.float32)}), f"both {BLOCKS} and"),
        ("gpt_oss", lambda t: t.update({FP4_SCALES: t[FP4_SCALES] | 255}), f"{FP4_SCALES} has a NaN scale (255)"),
    ],
    indirect=["folders"],
)
@pytest.mark.slow
def test_scales_that_do_not_fit_are_named(folders, change, expected, tmp_path):
    read = TensorFolder(folders[0])
    tensors = {name: read.read(name) for name in read.home}
    change(tensors)
    settings = read_fields(folders[0]).raw["quantization_config"]
    write(tmp_path / "bad", tensors, read_fields(folders[1]).raw, settings)
    with pytest.raises(ValueError) as caught:
        from_pretrained(tmp_path / "bad", make_mesh(ParallelConfig(2, 4)))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_fingerprint_depends_on_tensors_and_not_on_files(tmp_path):
    tensors = {"a": np.arange(4, dtype=np.float32), "b": np.zeros((2, 3), np.float32)}

    def fingerprint(files):
        for file, held in files.items():
            save_file(held, tmp_path / file)
        places = {name: file for file, held in files.items() for name in held}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        return TensorFolder(tmp_path).fingerprint

    whole = fingerprint({"one": tensors})
    assert whole == fingerprint({"one": {"a": tensors["a"]}, "two": {"b": tensors["b"]}})
    changes = ({"a": tensors["a"] + 1}, {"b": tensors["b"].T.copy()}, {"b": tensors["b"].view(np.int32)})
    others = {fingerprint({"one": tensors | change}) for change in (*changes, {"c": tensors["a"]})}
    assert len(others | {whole}) == 5


BAD_SCALES = {
    "mxfp4": (
        {"quant_method": "mxfp4"},
        {"w_blocks": np.zeros((2, 3, 1, 16), np.uint8), "w_scales": np.full((2, 3, 1), 254, np.uint8)},
        255,
        r"w_scales has a NaN scale \(255\); expected finite scales",
    ),
    "fp8": (
        FP8,
        {"w": np.zeros((30, 30), ml_dtypes.float8_e4m3fn), "w_scale_inv": np.ones((2, 1), np.float32)},
        np.nan,
        "w_scale_inv has a scale nan; expected finite scales",
    ),
    "integers": (
        INTEGERS,
        {
            "w_packed": np.zeros((3, 4), np.int32),
            "w_scale": np.ones((3, 2), ml_dtypes.bfloat16),
            "w_shape": np.array([3, 32], np.int32),
        },
        -np.inf,
        "w_scale has a scale -inf; expected finite scales",
    ),
}


@pytest.mark.parametrize("kind", BAD_SCALES)
def test_a_scale_that_is_not_finite_is_refused_before_weights_are_read(tmp_path, kind):
    settings, tensors, bad, message = BAD_SCALES[kind]
    fields, scales = Fields(json.dumps({"quantization_config": settings})), dict(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    CheckpointWeights(TensorFolder(tmp_path), fields).check_scales({"w"})
    (name,) = (name for name in tensors if "_scale" in name)
    scales[name] = scales[name].copy()
    scales[name][-1] = bad
    save_file(scales, tmp_path / "model.safetensors")
    weights = CheckpointWeights(TensorFolder(tmp_path), fields)
    # Those of other weights are not read.
    weights.check_scales({"v"})
    for read in (lambda: weights.check_scales({"w"}), lambda: weights.read("w")):
        with pytest.raises(ValueError, match=message):
            read()


def test_loading_reads_scales_once(tmp_path, monkeypatch):
    tensors = BAD_SCALES["mxfp4"][1]
    save_file(tensors, tmp_path / "model.safetensors")
    weights, names = CheckpointWeights(TensorFolder(tmp_path), Fields(json.dumps({"quantization_config": "mxfp4"}))), []
    read = TensorFolder.read
    monkeypatch.setattr(TensorFolder, "read", lambda self, *of: names.append(of[0]) or read(self, *of))
    weights.check("w", (2, 32, 3))
    weights.read("w")
    assert sorted(names) == ["w_blocks", "w_scales"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"quant_method": "awq"}, "quant_method is 'awq'; expected fp8, mxfp4 or compressed-tensors"),
        ({}, "quant_method is None"),
        ("fp8", "weight_block_size"),
        ([8], "quant_method is [8]"),
        ({"quant_method": "fp8"}, "weight_block_size is None; expected [rows, columns]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size is [0, 128]"),
        (None, "has dtype F8_E4M3"),
        ({"quant_method": "compressed-tensors"}, "config_groups is None; expected weights equal in all groups"),
        (compressed("pack-quantized", **NUMBERS, symmetric=False), "expected float-quantized with 8 bits per channel"),
        (compressed("nvfp4-pack-quantized", **NUMBERS), "quantization_config is 'nvfp4-pack-quantized' of"),
    ],
)
def test_other_formats_are_refused(tmp_path, settings, expected):
    name = "lm_head.weight"
    write(tmp_path / "bad", {name: np.zeros((2, 3), ml_dtypes.float8_e4m3fn)}, {}, settings)
    with pytest.raises(ValueError, match=re.escape(expected)):
        CheckpointWeights(TensorFolder(tmp_path / "bad"), read_fields(tmp_path / "bad")).check(name, (2, 3))
