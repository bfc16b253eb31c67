"""Layout of `transformers` 5 in memory: one tensor has the gates and up projections of all experts of a layer."""

import re
from collections.abc import Iterable
from dataclasses import replace

from models.architectures.parameter_map import ParameterSlice
from models.decoder.config import DecoderConfig

EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
"""Name of a tensor of one expert: module, index and projection."""

HALVES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}
"""Projections of an expert in `gate_up_proj` by name, and their position."""


def renamed(name: str, names: Iterable[tuple[str, str]]) -> str:
    """Return the name of a tensor of a published file in the modules of `transformers` 5, before experts are packed."""
    for published, in_memory in names:
        name = name.replace(published, in_memory)
    return name


def packed_slice(piece: ParameterSlice, config: DecoderConfig, names: Iterable[tuple[str, str]]) -> ParameterSlice:
    """Return the slice of the tensor in memory of `transformers` 5 that has the values of a slice of a file."""
    # `experts.gate_up_proj` is `[E, 2 F, H]`, the gate first, and `experts.down_proj` `[E, H, F]`. GPT-OSS and Llama 4
    # have other orders of the dimensions, which are those of their files.
    name = renamed(piece.name, names)
    one = EXPERT.fullmatch(name)
    if one is None:
        return replace(piece, name=name)
    (module, _, projection), (rows, columns), expert = one.groups(), piece.shape, piece.expert
    assert expert is not None
    if projection not in HALVES:
        shape = (config.num_experts, rows, columns)
        return replace(piece, name=f"{module}.down_proj", shape=shape, index=(expert,))
    first, shape = HALVES[projection] * rows, (config.num_experts, 2 * rows, columns)
    return replace(piece, name=f"{module}.gate_up_proj", shape=shape, index=(expert, slice(first, first + rows)))
