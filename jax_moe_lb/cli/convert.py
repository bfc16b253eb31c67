"""Commands `convert`, which reads recordings of other programs, and `drift`, which fits a drift to a trace."""

import io
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from jax_moe_lb.cli.output import (
    FileLimitsOption,
    Json,
    OutputPath,
    one_line_errors,
    option,
    parse_integer,
    parse_limits,
    print_json,
    print_text,
)
from jax_moe_lb.core.plan_file import whole_file
from jax_moe_lb.core.topology import INT32_MAX
from jax_moe_lb.recordings.counts_files import naming, read_trace
from jax_moe_lb.recordings.formats import read_recording
from jax_moe_lb.sim.drift import LEAST_STEPS, fitted_drift, moments


def convert(
    recording: Annotated[
        Path, typer.Argument(metavar="RECORDING", help="A .pt file, or the folder with the files of all ranks.")
    ],
    out: Annotated[Path, option("--out", "TRACE.npz", "Output file of counts and steps."), OutputPath(".npz")],
    ranks: Annotated[
        str | None, option("--ranks", "R", "Number of ranks; required if the recording does not store it.")
    ] = None,
    experts: Annotated[
        str | None, option("--experts", "E", "Number of experts; required if the recording does not store it.")
    ] = None,
    file_limits: FileLimitsOption = None,
) -> None:
    """Convert a recording of SGLang or Megatron-LM to a trace.

    Recordings are expert distribution dumps of SGLang or router traces of Megatron-LM.
    """
    with one_line_errors():
        num_ranks, num_experts = parse_integer("--ranks", ranks, 2**20), parse_integer("--experts", experts, 2**16)
        trace = read_recording(recording, num_ranks, num_experts, parse_limits(file_limits))
        packed = io.BytesIO()
        np.savez_compressed(packed, steps=np.array(trace.steps), counts=trace.counts)
        with naming("--out", out), whole_file(out) as part:
            part.write_bytes(packed.getvalue())
        sizes = dict(zip(("steps", "layers", "ranks", "experts"), trace.counts.shape, strict=True))
        print_text(f"{out}: {', '.join(f'{size} {name}' for name, size in sizes.items())}")


LAGS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Lags of the comparison between recording and fit, in steps, up to half the steps."""


def drift(
    trace_file: Annotated[Path, typer.Argument(metavar="TRACE.npz", help="Counts of shape [steps, layers, R, E].")],
    per_token: Annotated[str, option("--per-token", "K", "Experts per token.")],
    skip: Annotated[str | None, option("--skip", "N", "Number of first steps to skip.", "0")] = None,
    file_limits: FileLimitsOption = None,
    as_json: Json = False,
) -> None:
    """Fit the drift of expert popularity to a trace.

    The output has the key `routing: drift` of a configuration file and the autocorrelation of recording and fit.
    """
    with one_line_errors(per_token=per_token):
        counts = read_trace(trace_file, parse_limits(file_limits)).counts
        choices = parse_integer("--per-token", per_token, INT32_MAX) or 1
        counts = counts[parse_integer("--skip", skip, max(len(counts) - LEAST_STEPS, 0), least=0) or 0 :]
        found = fitted_drift(counts, choices)
        lags = [lag for lag in LAGS if lag <= len(counts) // 2]
        recorded, fit = moments(counts, choices, lags).correlations, [found.correlation(lag) for lag in lags]
        if as_json:
            print_json({**asdict(found), "lags": lags, "recorded": list(recorded), "fit": fit})
            return
        steps, layers, ranks, experts = counts.shape
        rounded = {name: float(f"{value:.3g}") for name, value in asdict(found).items()}
        # Shares of different sizes, rounded apart, may exceed 1.
        rounded["drifting"] = min(rounded["drifting"], 1 - rounded["steady"])
        values = ", ".join(f"{name}: {value:.4g}" for name, value in rounded.items())
        print_text(f"# {trace_file}: {steps} steps, {layers} layers, {ranks} ranks, {experts} experts")
        print_text(f"routing: {{drift: {{{values}}}}}")
        print_text("# autocorrelation of log popularity over experts")
        for name, numbers in (("lag", lags), ("recorded", recorded), ("fit", fit)):
            digits = "7d" if name == "lag" else "7.3f"
            print_text(f"# {name:8}" + "".join(f"{number:{digits}}" for number in numbers))
