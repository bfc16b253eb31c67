"""Reader of quantized checkpoint weights, converted to floats.

Published formats are supported: DeepSeek's `fp8` (one scale per block of 128 x 128 weights), GPT-OSS's `mxfp4` (OCP
Microscaling: a power-of-two scale per 32 weights of 4 bits), and two of `compressed-tensors`: `float-quantized` (8-bit
floats with a scale per row or block) and `pack-quantized` (integers of 4 or 8 bits with a scale per group of a row).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from jax_moe_lb.core.checks import shown
from models.architectures.config_json import Fields
from models.architectures.parameter_map import Index
from models.pretrained.safetensors import FLOATS, FP8, TensorFolder, short

# Suffixes of packed integers, of the scales of `compressed-tensors`, and of the shape of packed weights.
PACKED, SCALE, SHAPE = "_packed", "_scale", "_shape"
WORD_BITS = 32  # bits of a word of packed integers
BLOCKS, SCALES = "_blocks", "_scales"  # suffixes of the values and scales of an `mxfp4` tensor

FP4, E8M0 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu  # dtypes of the values and scales of `mxfp4`
FP4_GROUP = 32  # weights per scale in `mxfp4`
NAN_SCALE = 255  # byte of a scale that is NaN in `mxfp4`


@dataclass(frozen=True)
class Fp8:
    """8-bit floats with a scale per block, the published format of DeepSeek-V3, or per row, that of GLM-4.5-FP8."""

    block: tuple[int, int | None]  # rows and columns per scale, `None` for all; blocks at the edges may be smaller
    suffix: str  # suffix of the names of scales

    def weights(self, tensors: TensorFolder) -> tuple[dict[str, tuple[int, ...]], set[str]]:
        """Return the 8-bit matrices."""
        found: dict[str, tuple[int, ...]] = {}
        for name, header in tensors.home.items():
            if header.dtypes[name] == FP8:
                shape = header.shapes[name]
                if len(shape) != 2:
                    raise ValueError(
                        f"{header.path}: {short(name)} has shape {shown(list(shape))}; expected a matrix of {FP8}"
                    )
                rows, columns = self.block
                blocks = -(-shape[0] // rows), 1 if columns is None else -(-shape[1] // columns)
                _require(tensors, name, name + self.suffix, blocks, FLOATS)
                found[name] = shape
        return found, found.keys() | {name + self.suffix for name in found}

    def read(self, tensors: TensorFolder, name: str, index: Index) -> np.ndarray:
        """Multiply each row of blocks by its scales."""
        narrow, scales = tensors.read(name), self.scales(tensors, name)
        rows, columns = self.block
        if columns is None:
            return (narrow.astype(np.float32) * np.repeat(scales, rows, 0)[: narrow.shape[0]])[index]
        wide = np.empty(narrow.shape, np.float32)
        for line, factors in enumerate(scales):
            at = slice(line * rows, (line + 1) * rows)
            wide[at] = narrow[at]
            # A block may declare more columns than the matrix has.
            wide[at] *= np.repeat(factors, min(columns, wide.shape[1]))[: wide.shape[1]]
        return wide[index]

    def scales(self, tensors: TensorFolder, name: str) -> np.ndarray:
        """Read scales as float32; raise `ValueError` if one is not finite."""
        return _finite(tensors, name + self.suffix)


@dataclass(frozen=True)
class PackedIntegers:
    """Symmetric integers of a row in words of 32 bits, the first in the lowest bits; used by Kimi-K2-Thinking."""

    bits: int  # bits of an integer, stored plus half of its range
    group: int | None  # columns per scale; `None` for a scale per row

    def weights(self, tensors: TensorFolder) -> tuple[dict[str, tuple[int, ...]], set[str]]:
        """Return the matrices with packed integers."""
        found: dict[str, tuple[int, ...]] = {}
        for packed in [name for name in tensors.home if name.endswith(PACKED)]:
            header, name = tensors.home[packed], packed.removesuffix(PACKED)
            shape = header.shapes[packed]
            if len(shape) != 2 or header.dtypes[packed] != "I32":
                what = f"{header.dtypes[packed]} {shown(list(shape))}"
                raise ValueError(f"{header.path}: {short(packed)} is {what}; expected a matrix of I32")
            columns = shape[1] * WORD_BITS // self.bits
            scales = shape[0], 1 if self.group is None else -(-columns // self.group)
            _require(tensors, packed, name + SCALE, scales, FLOATS)
            _require(tensors, packed, name + SHAPE, (2,), ("I32", "I64"))
            found[name] = (shape[0], columns)
        return found, {name + part for name in found for part in (PACKED, SCALE, SHAPE)}

    def read(self, tensors: TensorFolder, name: str, index: Index) -> np.ndarray:
        """Read whole rows, unpack them and multiply them by their scales."""
        packed, scales = tensors.read(name + PACKED, index[:1]), self.scales(tensors, name, index[:1])
        columns = packed.shape[1] * WORD_BITS // self.bits
        if (given := tensors.read(name + SHAPE).tolist())[1] != columns:
            raise ValueError(f"{tensors.folder}: {short(name + SHAPE)} is {given}; expected {columns} columns")
        shifts = np.arange(0, WORD_BITS, self.bits, dtype=np.uint32)
        stored = (packed.view(np.uint32)[..., None] >> shifts) & np.uint32(2**self.bits - 1)
        wide = stored.reshape(len(packed), columns).astype(np.float32) - 2 ** (self.bits - 1)
        wide *= np.repeat(scales, self.group or columns, 1)[:, :columns]
        return wide[(slice(None), *index[1:])]

    def scales(self, tensors: TensorFolder, name: str, index: Index = ()) -> np.ndarray:
        """Read scales as float32; raise `ValueError` if one is not finite."""
        return _finite(tensors, name + SCALE, index)


@dataclass(frozen=True)
class Mxfp4:
    """4-bit floats, two per byte, with a power-of-two scale per 32; used by GPT-OSS for its experts."""

    # Blocks `[E, N, G, 16]` and scales `[E, N, G]` represent weights `[E, 32 G, N]`: a row of bytes is a column of
    # weights.

    def weights(self, tensors: TensorFolder) -> tuple[dict[str, tuple[int, ...]], set[str]]:
        """Return the tensors with blocks and scales."""
        found: dict[str, tuple[int, ...]] = {}
        for blocks in [name for name in tensors.home if name.endswith(BLOCKS)]:
            header, name = tensors.home[blocks], blocks.removesuffix(BLOCKS)
            shape = header.shapes[blocks]
            if len(shape) != 4 or shape[-1] * 2 != FP4_GROUP or header.dtypes[blocks] != "U8":
                what = f"{header.dtypes[blocks]} {shown(list(shape))}"
                raise ValueError(f"{header.path}: {short(blocks)} is {what}; expected U8 [E, N, G, {FP4_GROUP // 2}]")
            _require(tensors, blocks, name + SCALES, shape[:-1], ("U8",))
            if name in tensors.home:
                raise ValueError(
                    f"{header.path}: both {short(blocks)} and {short(name)} exist; expected one of the two"
                )
            found[name] = (shape[0], FP4_GROUP * shape[2], shape[1])
        return found, {name + half for name in found for half in (BLOCKS, SCALES)}

    def read(self, tensors: TensorFolder, name: str, index: Index) -> np.ndarray:
        """Read whole experts from disk; select rows and columns before the conversion to floats."""
        experts, rows, columns = (index + (slice(None),) * 3)[:3]
        blocks = tensors.read(name + BLOCKS, (experts,))[..., columns, :, :]
        scales = self.scales(tensors, name, (experts,)).view(E8M0)[..., columns, :].astype(np.float32)
        wide = np.stack([blocks & 15, blocks >> 4], -1).view(FP4).astype(np.float32) * scales[..., None, None]
        return np.swapaxes(wide.reshape(*blocks.shape[:-2], -1), -1, -2)[..., rows, :]

    def scales(self, tensors: TensorFolder, name: str, index: Index = ()) -> np.ndarray:
        """Read scales as bytes, which are exponents; raise `ValueError` if one is NaN."""
        scales = tensors.read(name + SCALES, index)
        if (scales == NAN_SCALE).any():
            raise ValueError(f"{tensors.folder}: {short(name + SCALES)} has a NaN scale (255); expected finite scales")
        return scales


def _finite(tensors: TensorFolder, name: str, index: Index = ()) -> np.ndarray:
    scales = tensors.read(name, index).astype(np.float32)
    if not (finite := np.isfinite(scales)).all():
        raise ValueError(f"{tensors.folder}: {short(name)} has a scale {scales[~finite][0]}; expected finite scales")
    return scales


def _require(tensors: TensorFolder, weight: str, scale: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    """Raise `ValueError` if the scales of a weight are missing or have a wrong shape or dtype."""
    if scale not in tensors.home:
        raise ValueError(
            f"{tensors.home[weight].path}: {short(weight)} has no scales; expected {short(scale)} {list(shape)}"
        )
    header = tensors.home[scale]
    if header.shapes[scale] != shape or header.dtypes[scale] not in dtypes:
        what = f"{header.dtypes[scale]} {shown(list(header.shapes[scale]))}"
        raise ValueError(f"{header.path}: {short(scale)} is {what}; expected {' or '.join(dtypes)} {list(shape)}")


# Storage format: `weights` returns the shapes of weights and the tensors storing them, `read` a weight as float32, and
# `scales` its checked scales.
Format = Fp8 | PackedIntegers | Mxfp4


def format_of(fields: Fields) -> Format | None:
    """Return the storage format given by a `config.json`; `None` if all weights are floats."""
    settings: Any = fields.raw.get("quantization_config")
    if settings is None:
        return None
    settings = settings if isinstance(settings, dict) else {"quant_method": settings}
    kind = settings.get("quant_method")
    if kind == "mxfp4":
        return Mxfp4()
    if kind == "compressed-tensors":
        return _compressed(settings)
    if kind != "fp8":
        raise ValueError(
            f"config.json: quantization_config.quant_method is {shown(kind)}; expected fp8, mxfp4 or "
            f"compressed-tensors, or no quantization_config"
        )
    return Fp8(_block("weight_block_size", settings.get("weight_block_size")), "_scale_inv")


def _block(name: str, sizes: Any) -> tuple[int, int]:
    if not isinstance(sizes, list) or len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError(f"config.json: quantization_config.{name} is {shown(sizes)}; expected [rows, columns]")
    return sizes[0], sizes[1]


def _compressed(settings: dict[str, Any]) -> Format:
    """Return the format of the weights of `compressed-tensors`, equal in all groups of modules."""
    groups, kind = settings.get("config_groups"), settings.get("format")
    listed = list(groups.values()) if isinstance(groups, dict) else []
    found = [group.get("weights") for group in listed if isinstance(group, dict)]
    names = ("type", "num_bits", "strategy", "group_size", "symmetric", "block_structure")
    schemes: list[dict[str, Any]] = [{name: one.get(name) for name in names} for one in found if isinstance(one, dict)]
    if not schemes or len(schemes) != len(listed) or any(scheme != schemes[0] for scheme in schemes):
        raise ValueError(
            f"config.json: quantization_config.config_groups is {shown(groups)}; expected weights equal in all groups"
        )
    scheme = schemes[0]
    numbers, strategy, group = (scheme["type"], scheme["num_bits"]), scheme["strategy"], scheme["group_size"]
    if kind == "float-quantized" and numbers == ("float", 8):
        if strategy == "channel":
            return Fp8((1, None), SCALE)
        if strategy == "block":
            return Fp8(_block("block_structure", scheme["block_structure"]), SCALE)
    is_group = strategy == "group" and type(group) is int and group > 0
    is_packed = kind == "pack-quantized" and numbers in (("int", 4), ("int", 8)) and scheme["symmetric"] is not False
    if is_packed and (is_group or strategy == "channel"):
        return PackedIntegers(numbers[1], group if is_group else None)
    raise ValueError(
        f"config.json: quantization_config is {shown(kind)} of {shown(scheme)}; expected float-quantized with 8 bits "
        "per channel or block, or pack-quantized with symmetric integers of 4 or 8 bits per group or channel"
    )


class Weights(Protocol):
    """Named tensors of a model as floats."""

    # `place` names them in messages, and `shapes` has the shape of each by name.

    place: str
    shapes: dict[str, tuple[int, ...]]

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise `ValueError` unless a tensor has the given shape and a supported dtype."""

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """Return a tensor, or a part of it."""


class CheckpointWeights:
    """Weights of a checkpoint as floats, in any supported format."""

    def __init__(self, tensors: TensorFolder, fields: Fields) -> None:
        self.tensors, self.format, self.place = tensors, format_of(fields), str(tensors.folder)
        self.quantized, held = self.format.weights(tensors) if self.format is not None else ({}, set())
        plain = {name: header.shapes[name] for name, header in tensors.home.items() if name not in held}
        self.shapes = plain | self.quantized

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise `ValueError` unless a weight has the given shape and a supported dtype."""
        header = next(
            self.tensors.home[name + part] for part in ("", BLOCKS, PACKED) if name + part in self.tensors.home
        )
        if self.shapes[name] != shape:
            raise ValueError(f"{header.path}: {name} has shape {list(self.shapes[name])}; expected {list(shape)}")
        if name not in self.quantized and header.dtypes[name] not in FLOATS:
            raise ValueError(f"{header.path}: {name} has dtype {header.dtypes[name]}; expected one of {FLOATS}")

    def check_scales(self, names: Iterable[str]) -> None:
        """Read the scales of quantized weights; raise `ValueError` if one is not finite."""
        for name in names:
            if self.format is not None and name in self.quantized:
                self.format.scales(self.tensors, name)

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """Read a weight, or a part of it: quantized weights as float32, others in their own dtype."""
        if self.format is not None and name in self.quantized:
            return self.format.read(self.tensors, name, index)
        return self.tensors.read(name, index)
