"""Readers of other programs' routing recordings: SGLang's expert distributions and Megatron-LM's router traces.

Both become the counts `[steps, layers, R, E]` of a `Trace`. Layers and steps without routed tokens are omitted.
"""

from collections import Counter, defaultdict
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jax_moe_lb.core.checks import MOST_SHOWN, shown
from jax_moe_lb.core.file_limits import FileLimits, LimitError, open_regular, parse_json
from jax_moe_lb.recordings.counts_files import Trace, checked
from jax_moe_lb.recordings.torch_file import Tensor, read_torch

MEGATRON, SGLANG = "router_trace_rank*.jsonl", "*.pt"
"""File name patterns of a recording folder, with one file per rank."""

RECORD_BYTES = 1024
"""Upper bound of the bytes of a record besides the counts."""

RecordedCounts = Int[np.ndarray, "steps layers R E"]


def read_recording(
    path: Path, num_ranks: int | None, num_experts: int | None, limits: FileLimits = FileLimits()
) -> Trace:
    """Read a recording."""
    try:
        files = sorted(path.glob(MEGATRON)) if path.is_dir() else []
        if files or path.suffix == ".jsonl":
            steps, counts = _megatron(files or [path], num_experts, limits)
        else:
            files = sorted(path.glob(SGLANG)) if path.is_dir() else [path]
            if not files:
                raise ValueError(f"no recording found; expected {MEGATRON} of Megatron-LM or {SGLANG} of SGLang")
            steps, counts = _sglang(files, num_ranks, limits)
    except OSError as error:
        raise ValueError(f"RECORDING is {path}: {error.strerror or error}; expected a readable recording") from error
    except LimitError as error:
        raise LimitError(f"RECORDING is {path}: {error}") from error
    except ValueError as error:
        raise ValueError(f"RECORDING is {path}: {error}") from error
    for name, wanted, found in (("--ranks", num_ranks, counts.shape[2]), ("--experts", num_experts, counts.shape[3])):
        if wanted is not None and wanted != found:
            raise ValueError(f"{name} is {wanted}; expected {found}, as in {path}")
    routed = counts.any((2, 3))
    used, layers = routed.any(1), routed.any(0)
    return Trace(np.asarray(steps)[used].tolist(), checked("RECORDING", path, counts[used][:, layers], limits))


# ---- SGLang ------------------------------------------------------------------------
def _sglang(files: list[Path], num_ranks: int | None, limits: FileLimits) -> tuple[list[int], RecordedCounts]:
    """Read dumps of the recorder: sums over ranks (`stat`), or the passes of a rank (`per_pass`, `per_token`)."""
    first = _named(files[0], read_torch(files[0], limits))
    if "logical_count" in first:
        if len(files) > 1:
            raise ValueError(f"{files[0].name} has the sums of all ranks; expected one file, not {len(files)}")
        total = _integers("logical_count", first["logical_count"], 3)
        return list(range(len(total))), _spread(total, num_ranks, limits)
    ranks: dict[int, Passes] = {}
    num_bytes = 0
    for file in files:
        passes = _passes(_named(file, read_torch(file, limits)), limits)
        if passes.rank in ranks:
            raise ValueError(f"{file.name} has rank {passes.rank}; expected one file per rank")
        ranks[passes.rank] = passes
        num_bytes += sum(counts.nbytes for counts in passes.counts.values())
        limits.check("array_bytes", num_bytes, "passes of {} bytes")
    return _of_ranks([ranks[rank] for rank in sorted(ranks)], num_ranks, limits)


def _named(file: Path, dump: Any) -> dict[str, Any]:
    if not isinstance(dump, dict) or not dump.keys() & {"logical_count", "records"}:
        raise ValueError(f"{file.name} is not a dump of an expert distribution; expected logical_count or records")
    return dump


class Passes(NamedTuple):
    """Recorded passes of one rank."""

    rank: int  # index of the rank
    counts: dict[int, np.ndarray]  # `[layers, E]` counts by pass number; experts are those of the model
    used: np.ndarray  # true for physical experts with tokens


def _passes(dump: dict[str, Any], limits: FileLimits) -> Passes:
    places, rank = _integers("last_physical_to_logical_map", dump.get("last_physical_to_logical_map"), 2), -1
    found: dict[int, np.ndarray] = {}
    used, num_experts = np.zeros(places.shape[1], bool), int(places.max()) + 1
    if num_experts > places.shape[1]:
        raise ValueError(
            f"last_physical_to_logical_map has expert {num_experts - 1}; expected at most {places.shape[1] - 1}"
        )
    records = dump.get("records")
    if not isinstance(records, list) or not records:
        raise ValueError("records is invalid; expected a list of at least one record")
    for record in records:
        if not isinstance(record, dict) or not all(map(_is_int64, map(record.get, ("rank", "forward_pass_id")))):
            raise ValueError("a record lacks rank or forward_pass_id; expected both as integers")
        if rank not in (-1, record["rank"]):
            raise ValueError(f"records have ranks {rank} and {record['rank']}; expected one rank per file")
        rank, number = record["rank"], record["forward_pass_id"]
        # They may be of two models, whose sum is no pass of either.
        if number in found:
            raise ValueError(f"records have pass {shown(number)} twice; expected one record per forward_pass_id")
        copies = _integers("global_physical_count", record.get("global_physical_count"), 2)
        if copies.shape != places.shape:
            raise ValueError(
                f"global_physical_count of pass {shown(number)} has shape {copies.shape}; expected {places.shape}"
            )
        limits.check("array_bytes", (len(found) + 1) * copies.nbytes, "passes of {} bytes")
        found[number] = np.zeros((len(places), num_experts), np.int64)
        np.add.at(found[number], (np.arange(len(places))[:, None], places), copies)
        used |= copies.any(0)
    return Passes(rank, found, used)


def _of_ranks(ranks: list[Passes], num_ranks: int | None, limits: FileLimits) -> tuple[list[int], RecordedCounts]:
    steps = sorted(set.intersection(*(set(passes.counts) for passes in ranks)))
    if not steps or len({passes.counts[steps[0]].shape for passes in ranks}) > 1:
        raise ValueError("the ranks have no common pass of equal shape; expected at least one")
    counts = np.stack([[passes.counts[step] for passes in ranks] for step in steps]).swapaxes(1, 2)
    same = len(ranks) > 1 and (counts == counts[:, :, :1]).all()
    # On a server without data parallelism, each rank has recorded the same tokens.
    if same or len(ranks) == 1:
        return steps, _spread(counts[:, :, 0], len(ranks) if same else num_ranks, limits)
    # With low-latency exchanges, each rank has recorded its received tokens, without their source ranks.
    homes = np.arange(len(ranks[0].used)) // -(-len(ranks[0].used) // len(ranks))
    apart = all((homes[passes.used] == place).all() for place, passes in enumerate(ranks))
    return steps, _spread(counts.sum(2), len(ranks), limits) if apart else counts


def _integers(name: str, tensor: Any, num_dimensions: int) -> np.ndarray:
    if not isinstance(tensor, Tensor) or len(tensor.shape) != num_dimensions or tensor.storage.dtype.kind != "i":
        raise ValueError(f"{name} is invalid; expected a tensor of integers with {num_dimensions} dimensions")
    if tensor.shape[-1] > 2**16 or not all(tensor.shape):
        raise ValueError(f"{name} has shape {tensor.shape}; expected no empty dimension and at most {2**16} columns")
    numbers: Any = tensor.array().astype(np.int64)
    if numbers.min() < 0 or numbers.max() >= 2**31:
        raise ValueError(f"{name} has values from {numbers.min()} to {numbers.max()}; expected 0 to {2**31 - 1}")
    return numbers


def _is_int64(value: object) -> bool:
    return type(value) is int and abs(value) < 2**63


def _spread(total: Int[np.ndarray, "steps layers E"], num_ranks: int | None, limits: FileLimits) -> RecordedCounts:
    """Divide counts equally over the ranks; the remainder goes to different ranks per expert."""
    if num_ranks is None:
        raise ValueError("--ranks is missing; expected the number of ranks, absent from this recording")
    limits.check("array_bytes", total.size * num_ranks * 8, f"counts of {{}} bytes on {num_ranks} ranks")
    ranks, experts = np.arange(num_ranks)[:, None], np.arange(total.shape[-1])[None]
    whole, left = np.divmod(total[:, :, None], num_ranks)
    return whole + ((ranks - experts) % num_ranks < left)


# ---- Megatron-LM -------------------------------------------------------------------
LayerRecord = tuple[str, int, int]
"""Block of a layer, the multi-token-prediction module and the index."""


def _megatron(files: list[Path], num_experts: int | None, limits: FileLimits) -> tuple[list[int], RecordedCounts]:
    """Read router traces: a line has the experts chosen by the tokens of a microbatch in one layer on one rank."""
    if num_experts is None:
        raise ValueError("--experts is missing; expected the number of experts, absent from this recording")
    found: dict[LayerRecord, dict[int, dict[tuple[int, int], np.ndarray]]] = defaultdict(lambda: defaultdict(dict))
    num_records, files_of_ranks = 0, dict[int, Path]()
    for file in files:
        seen: Counter[tuple[int, int, LayerRecord]] = Counter()
        with open_regular(file) as lines:
            while line := lines.readline(limits.text_bytes + 1):
                rank, step, layer, counts = _record(file, line, num_experts, limits)
                if files_of_ranks.setdefault(rank, file) != file:
                    raise ValueError(f"{file.name} has rank {rank}; expected one file per rank")
                # A step of several microbatches has one line per microbatch.
                found[layer][rank][step, seen[rank, step, layer]] = counts
                seen[rank, step, layer] += 1
                num_records += 1
                num_bytes = num_records * (num_experts * 8 + RECORD_BYTES)
                limits.check("array_bytes", num_bytes, f"{file.name}: records of {{}} bytes")
    layers = sorted(found)
    # Layers of other pipeline stages are on other ranks.
    ranks = [[found[layer][rank] for rank in sorted(found[layer])] for layer in layers]
    if not layers or len(set(map(len, ranks))) > 1:
        raise ValueError(f"layers are on {sorted(set(map(len, ranks)))} ranks; expected equally many for all layers")
    times = sorted(set.intersection(*(set(one) for each in ranks for one in each)))
    if not times:
        raise ValueError("the ranks have no common step; expected at least one")
    return [step for step, _ in times], np.array([[[one[at] for one in each] for each in ranks] for at in times])


def _record(
    file: Path, line: bytes, num_experts: int, limits: FileLimits
) -> tuple[int, int, LayerRecord, Int[np.ndarray, "E"]]:
    try:
        record: Any = parse_json(line, limits)
        rank, step, number, of_module = (record.get(n, 0) for n in ("rank", "step", "layer", "mtp_idx"))
        block, chosen = record.get("block", "decoder"), _chosen(record["top_indices"])
        if not all(map(_is_int64, (rank, step, number, of_module))) or not isinstance(block, str):
            raise ValueError
    except LimitError as error:
        raise LimitError(f"{file.name}: {error}") from error
    except (ValueError, KeyError, AttributeError, OverflowError) as error:
        text = line[:MOST_SHOWN].decode(errors="replace")
        raise ValueError(f"{file.name} has the line {shown(text)}; expected a router record") from error
    if chosen.size and chosen.max() >= num_experts:
        raise ValueError(
            f"{file.name} has expert {chosen.max()} in step {step}; expected at most {num_experts - 1} by --experts"
        )
    # Padding tokens have negative expert ids.
    counts = np.bincount(chosen[chosen >= 0], minlength=num_experts)
    return rank, step, (block, of_module, number), counts


def _chosen(rows: Any) -> Int[np.ndarray, "T K"]:
    """Check the types of the entries before converting them, because NumPy pads texts to the longest one."""
    if not isinstance(rows, list) or set(map(type, rows)) != {list} or len(set(map(len, rows))) != 1:
        raise ValueError
    if not set(map(type, chain.from_iterable(rows))) <= {int}:
        raise ValueError
    return np.array(rows, np.int64)
