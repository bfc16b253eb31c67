"""The simulator's commands read their arguments with these functions."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from jaxtyping import Int

from jax_moe_lb.checks import INT32_MAX, home_experts_per_rank
from jax_moe_lb.cli.files import read_routing
from jax_moe_lb.cli.options import positive
from jax_moe_lb.sim import Cluster, ModelShape, drifting_counts, skewed_counts
from jax_moe_lb.sim.config import Config, preset_names
from jax_moe_lb.sim.limits import shown

PRESETS = ", ".join(preset_names())

CYCLE = 3
"""Systems that keep history plan every so many steps."""

Counts = Int[np.ndarray, "steps layers R E"]

TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", metavar="COUNTS", help="Recorded counts, an npy or npz; drawn ones by default."),
]
Tokens = Annotated[str | None, typer.Option("--tokens", metavar="T", help="Tokens per rank, instead of the model's.")]
Imbalance = Annotated[
    str | None, typer.Option("--imbalance", metavar="X", help="Of drawn counts: max / mean of the ranks' load.")
]


def model_of(argument: str, source: str, config: Config, tokens: str | None) -> ModelShape:
    """Makes the model of a file, with other tokens per rank if some were given."""
    if config.model is None:
        raise ValueError(f"{argument} {source} has no model; expected one, or the name of a preset")
    model = config.model.build()
    wanted = positive("--tokens", tokens, INT32_MAX)
    return model if wanted is None else replace(model, tokens=wanted)


def cluster_of(argument: str, source: str, config: Config) -> Cluster:
    """Makes the machine of a file."""
    if config.cluster is None:
        raise ValueError(f"{argument} {source} has no cluster; expected one, or the name of a preset")
    return config.cluster.build()


def counts_of(config: Config, model: ModelShape, cluster: Cluster, trace: Path | None, imbalance: str | None) -> Counts:
    """Reads recorded counts, or draws those that a file describes."""
    if trace is not None:
        return recorded_counts(model, cluster, trace)
    layers = min(config.routing.layers, model.layers)
    wanted = imbalance_of(config, imbalance)
    return skewed_counts(model, cluster.num_ranks, wanted, layers, config.routing.seed, config.routing.shape)[None]


def drifted_counts_of(config: Config, model: ModelShape, cluster: Cluster, imbalance: str | None) -> Counts:
    """Draws steps for systems that plan from earlier ones: a cycle of theirs that is only remembered, and one more."""
    layers, routing = min(config.routing.layers, model.layers), config.routing
    wanted, times = imbalance_of(config, imbalance), range(2 * CYCLE)
    return drifting_counts(model, cluster.num_ranks, times, layers, routing.drift, wanted, routing.seed, routing.shape)


def recorded_counts(model: ModelShape, cluster: Cluster, trace: Path) -> Counts:
    """Reads the counts of a trace, which must have the machine's ranks and the model's experts."""
    counts = read_routing(trace)
    if counts.shape[2:] != (cluster.num_ranks, model.experts):
        raise ValueError(
            f"--trace {trace} has {counts.shape[2]} ranks and {counts.shape[3]} experts; expected the cluster's "
            f"{cluster.num_ranks} ranks and the model's {model.experts} experts"
        )
    return counts


def as_recorded(model: ModelShape, counts: Counts, trace: Path | None) -> ModelShape:
    """Gives the model as many tokens as the rank of a trace that has most."""
    if trace is None:
        return model
    tokens = -(-int(counts.sum(3).max()) // model.per_token)
    # A trace may hold no tokens at all, a model has at least one.
    return replace(model, tokens=max(tokens, 1))


def imbalance_of(config: Config, text: str | None) -> float:
    """Reads the number of `--imbalance`; without one, the file's."""
    if text is None:
        return config.routing.imbalance
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value < float("inf"):
        raise ValueError(f"--imbalance is {shown(text)}; expected a number, at least 1")
    return value


def slots_of(text: str | None, given: int | None, model: ModelShape, cluster: Cluster) -> int | None:
    """Reads the number of `--replica-slots`, or takes the file's; no rank has a slot for an expert that it has at home.

    Args:
        text: what the user wrote, `None` for nothing.
        given: `replica_slots` of the file.
        model: `E` is its experts.
        cluster: `L` is how many of them each of its ranks has at home.

    Raises:
        ValueError: it is more than `E - L`, or no number.
    """
    name, wanted = "replica_slots", given
    if text is not None:
        # No slots may be asked for, where a system has replicas by default.
        name, wanted = "--replica-slots", 0 if text == "0" else positive("--replica-slots", text, INT32_MAX)
    most = model.experts - home_experts_per_rank(model.experts, cluster.num_ranks, "model")
    if wanted is not None and wanted > most:
        raise ValueError(f"{name} is {wanted}; expected at most {most}, the experts that a rank does not have at home")
    return wanted
