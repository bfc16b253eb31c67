"""Rounding of rows by a quantized transfer, in NumPy, from its definition."""

import ml_dtypes
import numpy as np

LARGEST = {"float8": 448, "int8": 127}


def transferred(dtype: type, transfer: str, block: int, rows: np.ndarray) -> np.ndarray:
    """Return float64 rows after a transfer by a layer of this dtype.

    The largest number of each block becomes the largest one of the transfer's dtype, but scales are normal numbers. All
    arithmetic is in float32.

    Args:
        dtype: dtype of the layer, to which received rows are rounded.
        transfer: `"float8"` or `"int8"`.
        block: numbers per scale.
        rows: `[N, H]`.
    """
    blocks = rows.astype(dtype).astype(np.float32).reshape(len(rows), rows.shape[1] // block, block)
    largest = np.abs(blocks).max(2, keepdims=True)
    scales = np.maximum(largest * np.float32(1 / LARGEST[transfer]), np.finfo(np.float32).tiny)
    scaled = blocks * (np.float32(1) / scales)
    numbers = np.rint(scaled) if transfer == "int8" else scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return (numbers * scales).reshape(rows.shape).astype(dtype).astype(np.float64)
