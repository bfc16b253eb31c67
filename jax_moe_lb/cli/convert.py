"""`convert` makes counts of recordings of others, which `plan`, `replay` and `simulate` then read."""

import io
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from jax_moe_lb._plan_file import whole_file
from jax_moe_lb.cli.errors import one_line_errors
from jax_moe_lb.cli.files import naming
from jax_moe_lb.cli.options import positive
from jax_moe_lb.cli.recorded import read_recording


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
