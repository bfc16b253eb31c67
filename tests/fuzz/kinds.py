"""Kinds of files: a small valid input of each, its reader, and the conditions of a legal value."""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import ml_dtypes
import numpy as np
import pyarrow
import pyarrow.parquet
import tokenizers
from safetensors.numpy import save_file

from jax_moe_lb import Plan, Topology
from jax_moe_lb.core import plain_plan
from jax_moe_lb.recordings.counts_files import read_counts, read_routing, read_trace
from jax_moe_lb.recordings.formats import read_recording
from jax_moe_lb.sim.config import SimulationConfig, load_config
from models.architectures.config_json import read_fields
from models.architectures.registry import configured, pieces_of
from models.config import TrainConfig
from models.data.corpus import Corpus
from models.data.sources import corpus_from
from models.data.tokenizers import TokenizerFile, decoded, encoded, end_tokens, read_tokenizer
from models.pretrained.quantized import CheckpointWeights
from models.pretrained.safetensors import TensorFolder
from models.run_folder.files import damage, write_checksums
from models.run_folder.metrics import PER_STEP, RunFolder
from models.settings import read_file, updated
from models.tiny_checkpoint import tiny_config

RECORDED = Path(__file__).parents[1] / "cli" / "recorded"
COUNTS = np.arange(96).reshape(3, 1, 4, 8) % 7


class Kind(NamedTuple):
    """Kind of file.

    Args:
        write: function writing a valid input into an empty folder.
        read: function from this folder to its value.
        legal: function from a value to whether a user may work with it.
    """

    write: Callable[[Path], Any]
    read: Callable[[Path], Any]
    legal: Callable[[Any], bool]


def is_counts(counts: Any, num_dimensions: int) -> bool:
    return counts.dtype == np.int32 and counts.ndim == num_dimensions and counts.size > 0 and counts.min() >= 0


def is_trace(trace: Any) -> bool:
    return is_counts(trace.counts, 4) and len(trace.steps) == len(trace.counts) and set(map(type, trace.steps)) <= {int}


def write_npy(folder: Path) -> None:
    np.save(folder / "counts.npy", COUNTS[0, 0])


def write_npy_2(folder: Path) -> None:
    with (folder / "counts.npy").open("wb") as file:
        np.lib.format.write_array(file, COUNTS[:, 0].astype(np.int16), version=(2, 0))


def write_npz(folder: Path) -> None:
    np.savez_compressed(folder / "trace.npz", counts=COUNTS, steps=np.arange(3))


def write_plan(folder: Path) -> None:
    plain_plan(COUNTS[0, 0].astype(np.int32), Topology.flat(4), 3).save(folder / "plan.npz")


def is_plan(plan: Plan) -> bool:
    return plan.placement.ndim >= 2 and plan.quota.dtype.kind in "iu" and isinstance(plan.domain, int)


def write_sglang(folder: Path, name: str) -> None:
    source = RECORDED / name
    shutil.copytree(source, folder, dirs_exist_ok=True) if source.is_dir() else shutil.copy(source, folder)


def write_megatron(folder: Path) -> None:
    for rank in range(2):
        records = [
            {"step": step, "block": "decoder", "layer": 3, "rank": rank, "top_indices": [[step, 3], [2, 5], [-1, -1]]}
            for step in range(2)
        ]
        text = "".join(f"{json.dumps(record)}\n" for record in records)
        (folder / f"router_trace_rank{rank}.jsonl").write_text(text)


MACHINE = """
version: 1
cluster:
  levels:
    - &level {name: gpu, size: 4, rate: 10 GB/s, latency: 5 us}
  gemm: {rows: [1, 16], speeds: [1 TFLOP/s, 2 TFLOP/s]}
  compute: 1 TFLOP/s
model: {layers: 2, hidden: 64, inner: 128, experts: 8, per_token: 2, tokens: 64}
routing: {imbalance: 1.5, layers: 1, seed: 3}
"""

TRAINING = """
steps: 5
seed: 1
model: {num_layers: 2, embed_dim: 16, num_heads: 2, num_experts: 16, aux_loss: 1.0e-2}
batch: {size: 16, sequence_length: 16}
optimizer: {learning_rate: 2.0e-2, schedule: cosine}
parallel: {expert_parallel: 8, system: exact}
"""


def read_training(folder: Path) -> TrainConfig:
    given = read_file(folder / "training.yaml")
    try:
        return updated(TrainConfig(), given)
    except ValueError as error:
        # Values of a file and of options are checked together, so their errors name the key only.
        raise ValueError(f"training.yaml: {error}") from error


def write_config(folder: Path) -> None:
    for name in ("mixtral", "deepseek_v3", "gpt_oss", "qwen3_moe", "glm4_moe"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(tiny_config(name))


def read_config(folder: Path) -> list[Any]:
    configs = [configured(read_fields(path)) for path in sorted(folder.iterdir())]
    return [(config, len(pieces_of(config))) for config in configs]


def tensors(scale: float) -> dict[str, np.ndarray]:
    values = np.arange(12, dtype=np.float32).reshape(3, 4) * scale
    return {f"a{scale}": values, f"b{scale}": values.astype(ml_dtypes.bfloat16), f"c{scale}": np.arange(5)}


def write_safetensors(folder: Path) -> None:
    save_file(tensors(1), folder / "model.safetensors")


def write_shards(folder: Path) -> None:
    places = {}
    for number in (1, 2):
        name = f"model-{number:05}-of-00002.safetensors"
        save_file(tensors(number), folder / name)
        places |= dict.fromkeys(tensors(number), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}, indent=1))


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    found = TensorFolder(folder)
    return {name: np.array(found.read(name)) for name in found.home}


def write_float8(folder: Path) -> None:
    bits = np.arange(15).reshape(3, 5).astype(ml_dtypes.float8_e4m3fn)
    save_file({"a": bits, "a_scale_inv": np.ones((2, 2), np.float32)}, folder / "model.safetensors")
    settings = {"quant_method": "fp8", "weight_block_size": [2, 3]}
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))


def write_float4(folder: Path) -> None:
    blocks = np.arange(64, dtype=np.uint8).reshape(1, 2, 2, 16)
    save_file({"a_blocks": blocks, "a_scales": np.full((1, 2, 2), 127, np.uint8)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))


def read_weights(folder: Path) -> dict[str, np.ndarray]:
    fields = read_fields(folder)
    with np.errstate(all="ignore"):
        weights = CheckpointWeights(TensorFolder(folder), fields)
        return {name: np.array(weights.read(name)) for name in weights.shapes}


def write_tokenizer(folder: Path) -> None:
    words = {"a": 0, "b": 1, "ab": 2, "c": 5, "[PAD]": 6}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(words, [("a", "b")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.NFC(), tokenizers.normalizers.Replace("x", "ab")]
    )
    made.decoder = tokenizers.decoders.BPEDecoder()
    made.enable_padding(pad_id=6, length=8)
    made.enable_truncation(max_length=64)
    made.add_special_tokens(["<s>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"eos_token_id": [7]}')


def read_words(folder: Path) -> tuple[list[int], str, int]:
    words = read_tokenizer(folder / "tokenizer.json")
    tokens = encoded(words, "ab cab x <s> abc")
    end_tokens(folder)
    return tokens, decoded(words, tokens), TokenizerFile(folder / "tokenizer.json").vocab_size


def write_unigram(folder: Path) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.Unigram([("<unk>", 0.0), ("a", -1.0), ("ab", -1.5), ("c", -2.0)], 0))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.save(str(folder / "tokenizer.json"))


def read_unigram(folder: Path) -> tuple[list[int], str, int]:
    found = read_tokenizer(folder / "tokenizer.json")
    tokens = encoded(found, "ab cab")
    return tokens, found.decode(tokens), found.get_vocab_size()


def write_corpus(folder: Path) -> None:
    (folder / "a.txt").write_text("some words " * 20)
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": f"line {i}", "n": i}) + "\n" for i in range(9)))
    np.save(folder / "c.npy", (np.arange(60, dtype=np.uint16) % 200).reshape(6, 10))
    np.save(folder / "d.npy", np.arange(50, dtype=np.int64) % 200)


def write_tables(folder: Path) -> None:
    table = pyarrow.Table.from_pylist([{"text": f"row {i}", "messages": [{"role": "user"}]} for i in range(9)])
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=4)


def write_saved(folder: Path) -> None:
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list([{"text": f"row {i}", "messages": [{"role": "user"}]} for i in range(9)])
    rows.save_to_disk(folder)


def is_corpus(corpus: Corpus) -> bool:
    streams = [stream for part in corpus.parts for stream in part.streams]
    tokens = np.concatenate([np.asarray(stream.tokens) for stream in streams])
    return tokens.size > 0 and tokens.min() >= 0 and tokens.max() < corpus.vocab_size


def write_run(folder: Path) -> None:
    rows = [{"kind": "step", "step": step, "loss": 1.0 / step, "rounds_max": 1} for step in range(1, 5)]
    rows += [{"kind": "layout", "step": 0, "segment": 1, "system": "exact"}]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    arrays: dict[str, Any] = {name: np.ones((4, 1, 8), np.int32) for name in PER_STEP}
    np.savez_compressed(folder / "counts.npz", steps=np.arange(1, 5), **arrays)
    (folder / "config.json").write_text(json.dumps({"config": {"model": {"embed_dim": 16}}, "data": {"unit": "byte"}}))


def read_run(folder: Path) -> tuple[Any, ...]:
    run = RunFolder(folder)
    return run.described(), run.rows("step"), run.rows("layout", 3), run.read_counts()


def is_run(read: Any) -> bool:
    described, steps, layouts, _ = read
    return isinstance(described, dict) and all(type(row["step"]) is int for row in [*steps, *layouts])


def write_checkpoint(folder: Path) -> None:
    (folder / "state").mkdir()
    (folder / "state" / "0").write_bytes(bytes(range(256)))
    (folder / "run").write_text('{"layout": {}}')
    write_checksums(folder)


def read_checkpoint(folder: Path) -> bytes:
    """Return all data of a checkpoint, or raise the error of a damaged one."""
    if problem := damage(folder):
        raise ValueError(f"{folder}: {problem}")
    return (folder / "state" / "0").read_bytes() + (folder / "run").read_bytes()


def is_words(read: Any) -> bool:
    return all(0 <= token < 2**32 for token in read[0]) and isinstance(read[1], str) and read[2] > 0


KINDS = {
    "npy": Kind(write_npy, lambda at: read_counts(at / "counts.npy"), lambda value: is_counts(value, 3)),
    "npy, version 2": Kind(write_npy_2, lambda at: read_routing(at / "counts.npy"), is_trace),
    "npz trace": Kind(write_npz, lambda at: read_trace(at / "trace.npz"), is_trace),
    "npz plan": Kind(write_plan, lambda at: Plan.load(at / "plan.npz"), is_plan),
    "pt, sums": Kind(
        lambda at: write_sglang(at, "stat.pt"), lambda at: read_recording(at / "stat.pt", 2, None), is_trace
    ),
    "pt, passes": Kind(lambda at: write_sglang(at, "passes"), lambda at: read_recording(at, None, None), is_trace),
    "pt, received": Kind(lambda at: write_sglang(at, "received"), lambda at: read_recording(at, None, None), is_trace),
    "jsonl recording": Kind(write_megatron, lambda at: read_recording(at, None, 6), is_trace),
    "yaml, simulator": Kind(
        lambda at: (at / "machine.yaml").write_text(MACHINE),
        lambda at: load_config("CONFIG", str(at / "machine.yaml"), "cluster", "model"),
        lambda value: isinstance(value, SimulationConfig),
    ),
    "yaml, training": Kind(
        lambda at: (at / "training.yaml").write_text(TRAINING),
        read_training,
        lambda value: isinstance(value, TrainConfig),
    ),
    "config.json": Kind(write_config, read_config, lambda value: all(number > 0 for _, number in value)),
    "safetensors": Kind(write_safetensors, read_tensors, lambda value: isinstance(value, dict)),
    "safetensors, 8 bits": Kind(write_float8, read_weights, lambda value: isinstance(value, dict)),
    "safetensors, 4 bits": Kind(write_float4, read_weights, lambda value: isinstance(value, dict)),
    "safetensors, index": Kind(write_shards, read_tensors, lambda value: isinstance(value, dict)),
    "tokenizer.json, BPE": Kind(write_tokenizer, read_words, is_words),
    "tokenizer.json, unigram": Kind(write_unigram, read_unigram, is_words),
    "corpus": Kind(write_corpus, lambda at: corpus_from([at]), is_corpus),
    "parquet": Kind(write_tables, lambda at: corpus_from([at]), is_corpus),
    "folder of datasets": Kind(write_saved, lambda at: corpus_from([at]), is_corpus),
    "run folder": Kind(write_run, read_run, is_run),
    "checkpoint": Kind(write_checkpoint, read_checkpoint, lambda value: False),
}
"""All kinds by name. Data of a checkpoint never differ, because of its checksums."""


def digest(value: Any) -> str:
    """Return a hash of a value of a reader."""
    found = hashlib.sha256()

    def add(one: Any) -> None:
        if isinstance(one, np.ndarray):
            found.update(f"{one.dtype}{one.shape}".encode() + one.tobytes())
        elif dataclasses.is_dataclass(one) and not isinstance(one, type):
            add([(field.name, getattr(one, field.name)) for field in dataclasses.fields(one)])
        elif isinstance(one, dict):
            add(sorted(one.items(), key=repr))
        elif isinstance(one, list | tuple):
            found.update(b"(")
            for part in one:
                add(part)
            found.update(b")")
        else:
            found.update(repr(one).encode())

    add(value)
    return found.hexdigest()
