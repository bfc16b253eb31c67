"""The commands `convert`, which reads recordings of other programs, and `drift`, which fits a drift to a trace."""

import io
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from jax_moe_lb.cli.output import Json, one_line_errors, positive, print_json, print_text
from jax_moe_lb.core.plan_file import whole_file
from jax_moe_lb.core.topology import INT32_MAX
from jax_moe_lb.recordings.counts_files import naming, read_trace
from jax_moe_lb.recordings.formats import read_recording
from jax_moe_lb.sim.drift import fitted_drift, moments


def convert(
    recording: Annotated[Path, typer.Argument(metavar="RECORDING", help="A .pt file, or a folder of all ranks.")],
    out: Annotated[Path, typer.Option("--out", metavar="TRACE.npz", help="Where counts and steps go.")],
    ranks: Annotated[str | None, typer.Option("--ranks", metavar="R", help="Where the recording has none.")] = None,
    experts: Annotated[str | None, typer.Option("--experts", metavar="E", help="Where the recording has none.")] = None,
) -> None:
    """Make a trace of SGLang's expert distribution dumps, or of Megatron-LM's router traces."""
    with one_line_errors():
        trace = read_recording(recording, positive("--ranks", ranks, 2**20), positive("--experts", experts, 2**16))
        packed = io.BytesIO()
        np.savez_compressed(packed, steps=np.array(trace.steps), counts=trace.counts)
        with naming("--out", out), whole_file(out) as part:
            part.write_bytes(packed.getvalue())
        num_steps, layers, num_ranks, num_experts = trace.counts.shape
        typer.echo(f"{out}: {num_steps} steps, {layers} layers, {num_ranks} ranks, {num_experts} experts")


LAGS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Recording and fit are compared at these lags, as far as half of the steps."""


def drift(
    trace_file: Annotated[Path, typer.Argument(metavar="TRACE.npz", help="Counts [steps, layers, R, E].")],
    per_token: Annotated[str, typer.Option("--per-token", metavar="K", help="The experts of a token.")],
    skip: Annotated[
        str | None, typer.Option("--skip", metavar="N", help="Leave out the first steps, in which routers still learn.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Fit how the popularity of experts drifts, for `routing: drift` of a file, and say how well it fits."""
    with one_line_errors():
        counts, choices = read_trace(trace_file).counts, positive("--per-token", per_token, INT32_MAX) or 1
        counts = counts[positive("--skip", skip, INT32_MAX) or 0 :]
        if choices > counts.shape[3]:
            raise ValueError(f"--per-token is {choices}; expected at most the {counts.shape[3]} experts")
        found = fitted_drift(counts, choices)
        lags = [lag for lag in LAGS if lag <= len(counts) // 2]
        recorded, fit = moments(counts, choices, lags).correlations, [found.correlation(lag) for lag in lags]
        if as_json:
            print_json({**asdict(found), "lags": lags, "recorded": list(recorded), "fit": fit})
            return
        steps, layers, ranks, experts = counts.shape
        values = ", ".join(f"{name}: {value:.3g}" for name, value in asdict(found).items())
        print_text(f"# {trace_file}: {steps} steps, {layers} layers, {ranks} ranks, {experts} experts")
        print_text(f"routing: {{drift: {{{values}}}}}")
        print_text("# autocorrelation of log popularity over experts")
        for name, numbers in (("lag", lags), ("recorded", recorded), ("fit", fit)):
            digits = "7d" if name == "lag" else "7.3f"
            print_text(f"# {name:8}" + "".join(f"{number:{digits}}" for number in numbers))
