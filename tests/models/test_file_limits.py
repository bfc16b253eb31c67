"""Readers of models, data and runs refuse files by their declared sizes, and an option raises the limits."""

import json
import re
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from jax_moe_lb.core import FileLimits
from jax_moe_lb.core.file_limits import LimitError
from models.architectures.config_json import Fields, read_fields
from models.architectures.registry import configured
from models.data.sources import corpus_from, read_streams
from models.data.tokenizers import Bytes, TokenizerFile, encoded, read_tokenizer
from models.pretrained.quantized import CheckpointWeights
from models.pretrained.safetensors import TensorFolder, read_header
from models.run_folder.files import damage, write_checksums
from models.run_folder.metrics import PER_STEP, Recorder, RunFolder
from models.settings import read_file
from models.tiny_checkpoint import tiny_config


def tensors_file(path, **entries):
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return path


def test_headers_and_the_index_of_tensors(tmp_path):
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    path = tensors_file(tmp_path / "model.safetensors", **{f"tensor{i}": entry for i in range(20)})
    with pytest.raises(LimitError, match=rf"^{path}: a header of \d+ bytes; expected at most 100\. Pass"):
        read_header(path, FileLimits(text_bytes=100))
    with pytest.raises(LimitError, match=rf"^{path}: a JSON text of \d+ values; expected at most 50"):
        TensorFolder(tmp_path, FileLimits(values=50))
    assert len(read_header(path).shapes) == 20
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"tensor0": path.name}}))
    with pytest.raises(LimitError, match=r"index\.json: \d+ bytes; expected at most 40"):
        TensorFolder(tmp_path, FileLimits(text_bytes=40))


def test_long_names_of_files_are_shortened(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "n" * 10**6}}))
    with pytest.raises(ValueError, match="is missing; expected all files of the index") as refused:
        TensorFolder(tmp_path)
    assert len(str(refused.value)) < 300


def test_a_block_has_at_most_the_columns_of_its_matrix(tmp_path):
    """The scales would be repeated for a billion columns."""
    settings = {"quant_method": "fp8", "weight_block_size": [1, 10**9]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    bits = np.ones((2, 3), ml_dtypes.float8_e4m3fn)
    save_file({"a": bits, "a_scale_inv": np.array([[2.0], [3.0]], np.float32)}, tmp_path / "model.safetensors")
    weights = CheckpointWeights(TensorFolder(tmp_path), read_fields(tmp_path))
    tracemalloc.start()
    read = weights.read("a")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(read, [[2.0] * 3, [3.0] * 3])
    assert peak < 2**20


def test_experts_of_a_config_are_limited_before_their_tensors_are_listed():
    sizes = {"num_hidden_layers": 1024, "num_local_experts": 4096}
    fields = Fields(json.dumps(json.loads(tiny_config("mixtral")) | sizes))
    message = r"config.json: expert tensors with 100663296 values; expected at most 2097152"
    with pytest.raises(LimitError, match=message):
        configured(fields)


@pytest.mark.parametrize("value", ["1e400", "NaN", "9" * 400])
def test_numbers_of_a_config_are_finite(value):
    text = tiny_config("mixtral").replace('"rms_norm_eps": 1e-05', f'"rms_norm_eps": {value}')
    assert value in text
    with pytest.raises(ValueError, match=r"rms_norm_eps is .*; expected a finite number"):
        configured(Fields(text))


def test_a_config_is_limited(tmp_path):
    (tmp_path / "config.json").write_text(tiny_config("mixtral"))
    with pytest.raises(LimitError, match=rf"^{tmp_path}/config.json: \d+ bytes; expected at most 100"):
        read_fields(tmp_path, FileLimits(text_bytes=100))
    with pytest.raises(LimitError, match=r"^config.json: a JSON text of \d+ values; expected at most 3"):
        read_fields(tmp_path, FileLimits(values=3))


@pytest.fixture
def tokenizer(tmp_path):
    def write(words, change=lambda made: None):
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "a"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        change(made)
        made.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "config.json").write_text("{}")
        return tmp_path / "tokenizer.json"

    return write


def test_a_tokenizer_neither_pads_nor_truncates(tokenizer):
    """Padding to a declared length would take 100 GB."""
    path = tokenizer({"a": 0, "b": 1}, lambda made: (made.enable_padding(length=2**31), made.enable_truncation(1)))
    assert TokenizerFile(path).tokens(b"a b b").tolist() == [0, 1, 1]
    assert encoded(read_tokenizer(path), "b a") == [1, 0]


def test_a_vocabulary_is_limited(tokenizer):
    path = tokenizer({"a": 0, "b": 1})
    path.write_text(path.read_text().replace('"b": 1', f'"b": {2**31}'))
    with pytest.raises(LimitError, match=rf"^{path}: a vocabulary of 2147483649 tokens; expected at most 2097152"):
        read_tokenizer(path)
    with pytest.raises(LimitError, match=r"tokenizer.json: \d+ bytes; expected at most 10"):
        read_tokenizer(path, FileLimits(text_bytes=10))
    with pytest.raises(ValueError, match="its vocabulary is empty; expected at least one token"):
        read_tokenizer(tokenizer({}))


def test_a_text_without_tokens_is_refused_in_one_line():
    made = tokenizers.Tokenizer(tokenizers.models.Unigram([("a", 0.0)], None))
    with pytest.raises(ValueError, match=r"^tokenizer\.json cannot encode a text: "):
        encoded(made, "xyz")


def test_a_panic_of_the_tokenizer_is_refused_in_one_line():
    panic = type("PanicException", (BaseException,), {})

    class Panics:
        def encode(self, text):
            raise panic("range end index\n" * 100)

    with pytest.raises(ValueError, match=r"^tokenizer\.json cannot encode a text: range end index.{,60}$"):
        encoded(Panics(), "xyz")


def test_documents_of_a_corpus(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "some words", "other": [0] * 100}))
    with pytest.raises(LimitError, match=r"a.jsonl', whose line 1 is a JSON text of 105 values; expected at most 100"):
        corpus_from([tmp_path], limits=FileLimits(values=100))
    np.save(tmp_path / "b.npy", np.ones((100, 1), np.uint8))
    with pytest.raises(LimitError, match=r"b.npy', whose starts of documents have 800 bytes; expected at most 700"):
        corpus_from([tmp_path / "b.npy"], limits=FileLimits(array_bytes=700))
    assert corpus_from([tmp_path]).parts[0].streams[1].starts.tolist() == list(range(1, 100))


def test_an_array_without_tokens_may_declare_any_number_of_documents(tmp_path):
    with (tmp_path / "a.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (2**50, 0)})
    assert read_streams([tmp_path], Bytes()) == ([], 1)


@pytest.fixture
def run_dir(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.checkpoints.mkdir(parents=True)
    folder.config.write_text(json.dumps({"config": {}, "data": [0] * 50}))
    folder.metrics.write_text("".join(json.dumps({"kind": "step", "step": i}) + "\n" for i in range(1, 11)))
    np.savez_compressed(folder.counts, steps=np.arange(1, 11), **{name: np.zeros((10, 100)) for name in PER_STEP})
    return folder.path


def test_files_of_a_run(run_dir):
    whole = RunFolder(run_dir)
    assert len(whole.rows("step")) == len(whole.read_counts()["steps"]) == 10
    whole.check_limits()
    values, arrays = RunFolder(run_dir, FileLimits(values=10)), RunFolder(run_dir, FileLimits(array_bytes=2**14))
    message = r"metrics.jsonl': rows of 40 values; expected at most 10\. Pass --file-limits 1 "
    with pytest.raises(LimitError, match=message):
        values.rows("step")
    with pytest.raises(LimitError, match=r"config.json: a JSON text of \d+ values; expected at most 10"):
        values.described()
    with pytest.raises(LimitError, match=r"counts.npz': arrays of 32080 bytes; expected at most 16384"):
        arrays.check_limits()


def test_counts_beyond_the_limits_are_not_lost(run_dir):
    """Damaged counts are lost with a message; counts of a long run need the option."""
    with pytest.raises(LimitError, match="arrays of 32080 bytes"):
        Recorder(RunFolder(run_dir, FileLimits(array_bytes=2**14)), 11, writes=True, tell=pytest.fail)
    assert len(RunFolder(run_dir).read_counts()["steps"]) == 10


@pytest.mark.parametrize("line", ['{"ki', "3", "[]", '{"step": 1}', '{"kind": "step", "step": "1"}', "[" * 10**5])
def test_rows_have_a_kind_and_a_step(run_dir, line):
    path = RunFolder(run_dir).metrics
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([first, line, *others]))
    with pytest.raises(ValueError, match=rf"line 2 of '.*metrics.jsonl' is b'{re.escape(line[:40])}'; expected a JSON"):
        RunFolder(run_dir).rows("step")


@pytest.mark.parametrize("content", ["[[1, 2], [3, 4]]", "[]", "3", '{"' + "n" * 10**5 + '": "a"}', "[" * 10**5])
def test_checksums_of_another_form_are_damage(tmp_path, content):
    (tmp_path / "data").write_bytes(b"data")
    write_checksums(tmp_path)
    assert damage(tmp_path) is None
    (tmp_path / "sha256.json").write_text(content)
    assert re.fullmatch(r"sha256.json cannot be read|'.{1,60}' is not as it was written", damage(tmp_path))
    assert damage(tmp_path, FileLimits(text_bytes=0)).startswith("sha256.json: ")


def test_the_file_of_a_run_is_limited(tmp_path):
    (tmp_path / "x.yaml").write_text("steps: 3\n" * 3)
    with pytest.raises(ValueError, match=r"x.yaml' has 27 bytes; expected at most 20\. Pass --file-limits 1 "):
        read_file(tmp_path / "x.yaml", FileLimits(yaml_bytes=20))
