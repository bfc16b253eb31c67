"""Rows of Parquet files, and of the Arrow files in folders of `datasets`."""

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax_moe_lb.core import FileLimits
from jax_moe_lb.core.file_limits import LimitError, parse_json, read_bytes

SUFFIXES = (".parquet", ".arrow")
"""Ends of the names of files with rows."""

ROWS_AT_ONCE = 1024
"""Rows of a Parquet file to decode at a time."""


def table_files(folder: Path, limits: FileLimits) -> list[Path]:
    """Return the files of a folder with rows, by name; without them, other files are its documents."""
    if (folder / "dataset_dict.json").exists():
        splits = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir()))
        raise ValueError(f"data is {str(folder)!r}, which has the splits {splits}; expected the folder of one")
    if not (folder / "state.json").exists():
        return sorted(file for file in folder.rglob("*.parquet") if file.is_file())
    state = parse_json(read_bytes(folder / "state.json", limits), limits)
    if isinstance(state, dict) and state.get("_indices_data_files"):
        raise ValueError(
            f"data is {str(folder)!r}, which has indices into its rows; expected none. Save dataset.flatten_indices()"
        )
    return sorted(folder.glob("*.arrow"))


def table_rows(file: Path, limits: FileLimits) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet or Arrow file, without null fields."""
    # Arrow stores the fields of all rows in each of them, so that null and absent are the same.
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"data is {str(file)!r}, which requires pyarrow; run pip install '.[data]'")
    batches = _parquet(file, limits) if file.suffix == SUFFIXES[0] else _arrow(file)
    try:
        for batch in batches:
            for row in batch.to_pylist():
                yield _without_nulls(row)
    except (LimitError, MemoryError):
        raise
    except Exception as error:  # pyarrow raises its own types and those of Python for a damaged file
        reason = " ".join(str(error).split())[:80]
        raise ValueError(f"data is {str(file)!r}, which is damaged; expected rows: {reason}") from error


def _parquet(file: Path, limits: FileLimits) -> Iterator[Any]:
    table = importlib.import_module("pyarrow.parquet").ParquetFile(file)
    for group in range(table.num_row_groups):
        size = table.metadata.row_group(group).total_byte_size
        limits.check("array_bytes", size, f"data is {str(file)!r}, with a group of rows of {{}} bytes")
        yield from table.iter_batches(ROWS_AT_ONCE, row_groups=[group])


def _arrow(file: Path) -> Iterator[Any]:
    with importlib.import_module("pyarrow").memory_map(str(file)) as mapped:
        yield from importlib.import_module("pyarrow.ipc").open_stream(mapped)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
