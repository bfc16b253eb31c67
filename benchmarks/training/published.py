"""Sizes of published models, from the fields of their configurations.

Layers of multi-token prediction do not count.
"""

import argparse
from collections.abc import Mapping

from benchmarks.render.results import Table, Value
from models.architectures.published import PUBLISHED, num_params, published_config

COLUMNS = {"model": "", "layers": "d", "experts": "", "parameters B": ".1f", "active per token B": ".1f"}
COLUMNS |= {"GB in bfloat16": ".0f"}


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    rows: list[list[Value]] = []
    for name in PUBLISHED:
        config = published_config(name)
        total, active = num_params(config)
        experts = f"{config.router.num_experts_per_tok} of {config.num_experts}"
        rows.append([name, config.num_layers, experts, total / 1e9, active / 1e9, 2 * total / 1e9])
    return {"models": Table(COLUMNS, rows)}
