"""Recordings of SGLang and Megatron-LM become counts, and malicious files are refused."""

import io
import json
import pickle
import shutil
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from jax_moe_lb.cli import main
from jax_moe_lb.recordings.counts_files import read_trace
from jax_moe_lb.recordings.torch_file import read_torch
from tests.cli.commands import refusal
from tests.marks import parametrize

RECORDED = Path(__file__).parent / "recorded"
PLACES = [0, 1, 2, 0, 3, 3]


def converted(tmp_path, *argv):
    assert main(["convert", *map(str, argv), "--out", str(tmp_path / "out.npz")]) == 0
    return read_trace(tmp_path / "out.npz")


def passes(step, rank):
    """Return a rank's routing of one pass to each of 4 experts with 6 copies, two of them duplicates."""
    copies = np.arange(12).reshape(2, 6) * (rank + 1) + step
    return np.stack([np.bincount(PLACES, line, 4) for line in copies])


def test_sums_of_sglang_are_shared_out(tmp_path):
    trace = converted(tmp_path, RECORDED / "stat.pt", "--ranks", 2)
    assert trace.steps == [0, 1, 2, 3]
    expected = np.arange(96).reshape(8, 3, 4)[:4, 1:]
    np.testing.assert_array_equal(trace.counts.sum(2), expected)
    assert np.abs(np.diff(trace.counts, axis=2)).max() == 1


def test_passes_of_sglang_say_who_routed(tmp_path):
    trace = converted(tmp_path, RECORDED / "passes")
    assert trace.steps == [7, 8], "rank 1 has no pass 6"
    expected = [[[passes(step, rank)[layer] for rank in range(2)] for layer in range(2)] for step in (7, 8)]
    np.testing.assert_array_equal(trace.counts, expected)


def test_what_ranks_received_is_shared_out(tmp_path):
    trace = converted(tmp_path, RECORDED / "received")
    copies = [np.arange(12).reshape(2, 6) * (rank + 1) + 8 for rank in (0, 1)]
    came = np.where(np.arange(6)[None] < 3, *copies)
    total = np.stack([np.bincount(PLACES, line, 4) for line in came])
    np.testing.assert_array_equal(trace.counts[1].sum(1), total)
    assert np.abs(np.diff(trace.counts, axis=2)).max() == 1


def test_ranks_that_recorded_the_same_tokens_count_once(tmp_path):
    source = RECORDED / "passes" / "expert_distribution_recorder_1.5_0.pt"
    (tmp_path / "same").mkdir()
    shutil.copy(source, tmp_path / "same" / "0.pt")
    # The rank follows its name in the pickle; later records refer to it.
    rewritten(tmp_path / "half.pt", source, b"rankq\x05K\x00", b"rankq\x05K\x01")
    assert main(["convert", str(tmp_path / "half.pt"), "--out", str(tmp_path / "out.npz")]) == 2
    rewritten(tmp_path / "same" / "1.pt", tmp_path / "half.pt", b"h\x05K\x00", b"h\x05K\x01")
    trace = converted(tmp_path, tmp_path / "same")
    assert trace.counts.shape == (3, 2, 2, 4)
    np.testing.assert_array_equal(trace.counts[0].sum(1), passes(6, 0))


def test_a_pass_is_recorded_once(tmp_path, capsys):
    source = RECORDED / "passes" / "expert_distribution_recorder_1.5_0.pt"
    rewritten(tmp_path / "twice.pt", source, b"h\x04K\x08", b"h\x04K\x07")
    text = refusal(capsys, "convert", tmp_path / "twice.pt", "--ranks", 2, "--out", tmp_path / "out.npz")
    assert "records have pass 7 twice; expected one record per forward_pass_id" in text


def write_megatron(folder, change=lambda rank, records: records):
    """Write two pipeline stages of two ranks, two microbatches per step, with the last step of rank 3 truncated."""
    rng, counts = np.random.default_rng(0), np.zeros((2, 2, 2, 2, 6), int)
    folder.mkdir()
    for rank in range(4):
        records = []
        for step, microbatch in np.ndindex(2, 2):
            chosen = np.stack([rng.permutation(6)[:2] for _ in range(5)])
            chosen[4] = -1 if rank == 1 else chosen[4]
            np.add.at(counts[step, microbatch, rank // 2, rank % 2], chosen[chosen >= 0], 1)
            record = {"step": step + 10, "stage": "pre_dispatch", "block": "decoder", "layer": 3 - rank // 2 * 2}
            records.append(record | {"rank": rank, "num_tokens": 5, "topk": 2, "top_indices": chosen.tolist()})
        lines = [json.dumps(record) for record in change(rank, records[: 3 if rank == 3 else 4])]
        (folder / f"router_trace_rank{rank}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return counts


def test_traces_of_megatron(tmp_path):
    counts = write_megatron(tmp_path / "trace")
    trace = converted(tmp_path, tmp_path / "trace", "--experts", 6)
    assert trace.steps == [10, 10, 11]
    # Layer 1 is on ranks 2 and 3, layer 3 on ranks 0 and 1.
    np.testing.assert_array_equal(trace.counts, counts.reshape(4, 2, 2, 6)[:3, ::-1])


def each(**change):
    return lambda rank, records: [record | change for record in records]


NO_RECORD = "expected a router record"
MISFITS = [
    (lambda rank, records: [], "layers are on [] ranks"),
    (lambda rank, records: records if rank else [], "layers are on [1, 2] ranks"),
    (lambda rank, records: [record | {"step": rank} for record in records], "no common step"),
    (lambda rank, records: ["[" * 10_000], NO_RECORD),
    (each(top_indices=[[6, 0]]), "has expert 6 in step 10"),
    (each(top_indices=[[0], [1, 2]]), NO_RECORD),
    (each(top_indices=[[2**70]]), NO_RECORD),
    (each(step="1"), NO_RECORD),
    (each(rank=2), "router_trace_rank1.jsonl has rank 2; expected one file per rank"),
    (each(step=2**63), NO_RECORD),
    # NumPy would pad 100,000 texts to a million characters each.
    (lambda rank, records: [records[0] | {"top_indices": [["x" * 10**6], *[["y"]] * 10**5]}], NO_RECORD),
]


@pytest.mark.parametrize(("change", "expected"), MISFITS)
def test_traces_of_megatron_that_do_not_fit(tmp_path, capsys, change, expected):
    write_megatron(tmp_path / "trace", change)
    assert expected in refusal(capsys, "convert", tmp_path / "trace", "--experts", 6, "--out", tmp_path / "out.npz")
    assert not (tmp_path / "out.npz").exists()


def test_what_is_missing_or_contradicts_is_named(tmp_path, capsys):
    write_megatron(tmp_path / "trace")
    out = "--out", tmp_path / "out.npz"
    assert "--experts is missing" in refusal(capsys, "convert", tmp_path / "trace", *out)
    assert "--ranks is missing" in refusal(capsys, "convert", RECORDED / "stat.pt", *out)
    assert "--ranks is 4; expected 2" in refusal(capsys, "convert", RECORDED / "passes", "--ranks", 4, *out)
    assert "--experts is 9; expected 4" in refusal(capsys, "convert", RECORDED / "passes", "--experts", 9, *out)
    assert "multiple of the 3 ranks" in refusal(capsys, "convert", RECORDED / "stat.pt", "--ranks", 3, *out)
    assert "no recording found" in refusal(capsys, "convert", tmp_path, *out)
    assert "jax-moe-lb convert" in refusal(capsys, "replay", RECORDED / "stat.pt", "--balancer", "greedy")


class Runs:
    def __reduce__(self):
        return exec, ("raise SystemExit('it ran')",)


class Nested:
    def __reduce__(self):
        return dict, ((("a", Runs()),),)


def pickled(value, protocol=2):
    return pickle.dumps(value, protocol)


def rewritten(to, source, old, new):
    """Copy an archive with a changed pickle."""
    with zipfile.ZipFile(source) as before, zipfile.ZipFile(to, "w") as after:
        for name in before.namelist():
            content = before.read(name)
            after.writestr(name, content.replace(old, new) if name.endswith("data.pkl") else content)


def archive(**members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in members.items():
            file.writestr(f"a/{name.replace('_', '.', 1)}", content)
    return buffer.getvalue()


def copies(num_pairs, num_copies):
    """Return a pickle with a list of pairs and dictionaries of these pairs, each in 7 bytes."""
    pairs = b"".join(b"J" + struct.pack("<i", i) + b"N\x86" for i in range(num_pairs))
    return b"\x80\x02](ccollections\nOrderedDict\nq\x00](" + pairs + b"eq\x01" + b"h\x00h\x01\x85R" * num_copies + b"e."


SAME_HASH = [b"\x8a\x0a" + (i * (2**61 - 1)).to_bytes(10, "little") + b"N" for i in range(9, 30_000)]
HOSTILE = {
    "copies of a dictionary": (archive(data_pkl=copies(1000, 1000)), "its pickle calls data"),
    "a nested key": (archive(data_pkl=b"\x80\x02}K\x01" + b"\x85" * 3 * 10**5 + b"Ns."), "an item of another type"),
    "keys of one hash": (archive(data_pkl=b"\x80\x02}(" + b"".join(SAME_HASH) + b"u."), "an item of another type"),
    "many lists": (archive(data_pkl=b"\x80\x02" + b"]" * 2**21 + b"."), "a pickle of up to 2097155 values; expected"),
    "a large pickle": (archive(data_pkl=b"\x80\x02" + b"N" * 2**26 + b"."), "data.pkl of 67108867 bytes; expected"),
    "code": (archive(data_pkl=pickled(Runs())), "its pickle uses __builtin__.exec"),
    "code of old pickles": (archive(data_pkl=b"cos\nsystem\n(S'true'\ntR."), "its pickle uses os.system"),
    "code inside": (archive(data_pkl=pickled([Nested()])), "its pickle uses __builtin__.dict"),
    "object": (archive(data_pkl=pickled(Path("a"), 4)), "its pickle has"),
    "instance": (archive(data_pkl=b"\x80\x02ccollections\nOrderedDict\n)\x81}b."), "its pickle has NEWOBJ"),
    "a name of torch": (archive(data_pkl=b"\x80\x02ctorch\nload\n(X\x01\x00\x00\x00atR."), "uses torch.load"),
    "calling a storage": (archive(data_pkl=b"\x80\x02ctorch\nIntStorage\n)R."), "its pickle calls data"),
    "large memo": (archive(data_pkl=b"\x80\x02]r\xff\xff\xff\x7f."), "not a dump of an expert distribution"),
    "large bytes": (archive(data_pkl=b"\x80\x05\x96" + struct.pack("<Q", 1) + b"a."), "BYTEARRAY8"),
    "cut off": (archive(data_pkl=pickled([1, 2])[:-1]), "pickle exhausted"),
    "no pickle": (archive(version=b"3"), "data.pkl is missing"),
    "no archive": (pickled([1]), "no archive"),
    "not a storage": (archive(data_pkl=b"\x80\x02X\x01\x00\x00\x00aQ."), "not enough values"),
}


THOROUGH = ("many lists", "a nested key")


@parametrize("case", [case for case in HOSTILE if case not in THOROUGH], THOROUGH)
def test_a_pickle_holds_data_or_is_refused(case, tmp_path, capsys):
    content, expected = HOSTILE[case]
    (tmp_path / "bad.pt").write_bytes(content)
    assert expected in refusal(capsys, "convert", tmp_path / "bad.pt", "--ranks", 2, "--out", tmp_path / "out.npz")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (b"K\x08K\x03K\x04\x87", b"K\x7fK\x03K\x04\x87", "is outside its storage"),
        (b"K`tq", b"K_tq", "is outside its storage"),
        (b"K\x0cK\x04K\x01\x87", b"K\x0c\x88K\x01\x87", "a tensor is malformed"),
        (b"X\x01\x00\x00\x000q", b"X\x01\x00\x00\x007q", "'stat/data/7' is missing"),
        (b"IntStorage", b"LongStorage", "the size of its tensors"),
        (b"IntStorage", b"BoolStorage", "expected a tensor of integers"),
        (b"logical_count", b"physical_coun", "not a dump of an expert distribution"),
    ],
)
def test_tensors_that_lie(old, new, expected, tmp_path, capsys):
    rewritten(tmp_path / "bad.pt", RECORDED / "stat.pt", old, new)
    assert (tmp_path / "bad.pt").read_bytes().count(new) > (RECORDED / "stat.pt").read_bytes().count(new)
    assert expected in refusal(capsys, "convert", tmp_path / "bad.pt", "--ranks", 2, "--out", tmp_path / "out.npz")


def test_a_tensor_is_no_larger_than_the_file(tmp_path):
    """Strides of 0 would expand one number to a terabyte."""
    source = RECORDED / "stat.pt"
    rewritten(tmp_path / "bad.pt", source, b"K\x08K\x03K\x04\x87", b"J\xff\xff\xff\x0fK\x03K\x04\x87")
    rewritten(tmp_path / "worse.pt", tmp_path / "bad.pt", b"K\x0cK\x04K\x01\x87", b"K\x00K\x04K\x01\x87")
    with pytest.raises(ValueError, match="repeats its storage of 96 elements"):
        read_torch(tmp_path / "worse.pt")


def test_a_directory_that_lies_is_not_read(tmp_path, capsys):
    shutil.copy(RECORDED / "stat.pt", tmp_path / "bad.pt")
    content = bytearray((tmp_path / "bad.pt").read_bytes())
    at = content.rindex(b"PK\6\6") + 40
    content[at : at + 8] = struct.pack("<Q", 2**40)
    (tmp_path / "bad.pt").write_bytes(content)
    text = refusal(capsys, "convert", tmp_path / "bad.pt", "--ranks", 2, "--out", tmp_path / "out.npz")
    assert "a directory of 1099511627776 bytes" in text
