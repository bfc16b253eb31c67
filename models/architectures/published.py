"""Sizes of published models: fields of their `config.json`, besides those with the default of the architecture."""

import json
import math
from collections.abc import Iterable
from typing import Any

from models.architectures.config_json import Fields
from models.architectures.parameter_map import ParameterSlice
from models.architectures.registry import TABLES, configured, pieces_of
from models.decoder.config import DecoderConfig

PUBLISHED: dict[str, dict[str, Any]] = TABLES["published"]  # relevant `config.json` fields of each published model


def published_config(name: str) -> DecoderConfig:
    """Return the sizes of a published model."""
    if name not in PUBLISHED:
        raise ValueError(f"name is {name!r}; expected one of {', '.join(PUBLISHED)}")
    return configured(Fields(json.dumps(PUBLISHED[name])))


def num_params(config: DecoderConfig) -> tuple[int, int]:
    """Return the total parameters of a model, and the active parameters per token."""
    # Both include the embedding. Multi-token prediction layers do not count.
    pieces = pieces_of(config)
    in_experts = _size(piece for piece in pieces if piece.expert is not None)
    # A tensor stacking all experts has many slices but counts once.
    total = _size(pieces)
    per_token = config.router.num_experts_per_tok
    return total, total - in_experts + in_experts * per_token // config.num_experts


def _size(pieces: Iterable[ParameterSlice]) -> int:
    return sum(math.prod(shape) for shape in {piece.name: piece.shape for piece in pieces}.values())
