"""This program continues text with a checkpoint: `python -m models.generate --checkpoint DIR --prompt TEXT`."""

from pathlib import Path
from typing import Annotated

import typer

from jax_moe_lb.layer.systems import system_names
from models.config import USER_ERRORS, ParallelConfig, say
from models.data.tokenizers import CheckpointTokenizer
from models.mesh import make_mesh, make_system, offer_cpu_devices
from models.pretrained.generation import Sampling, generate
from models.pretrained.loading import from_pretrained
from models.run_folder.metrics import CountsTrace

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    checkpoint: Annotated[Path, typer.Option(help="Folder with config.json, safetensors and tokenizer.json.")],
    prompt: Annotated[list[str], typer.Option(help="Text to continue; may be repeated, which makes a batch.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens that follow each prompt.")] = 32,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token, 1 draws.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw among the likeliest tokens that have this share.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    system: Annotated[str, typer.Option(help=f"Who balances the load: {', '.join(system_names())}.")] = "exact",
    data_parallel: Annotated[int, typer.Option(help="Groups of ranks side by side.")] = 1,
    expert_parallel: Annotated[int, typer.Option(help="Ranks in a group; they divide the experts.")] = 8,
    dtype: Annotated[str, typer.Option(help="Of parameters and products: float32 or bfloat16.")] = "float32",
    record_counts: Annotated[Path | None, typer.Option(help="Write the routing, for jax-moe-lb replay.")] = None,
) -> None:
    """Continue each prompt, and prints it with what follows, one after the other."""
    try:
        parallel, sampling = ParallelConfig(data_parallel, expert_parallel, system), Sampling(temperature, top_p, seed)
        offer_cpu_devices(parallel.num_shards)
        words, trace = CheckpointTokenizer(checkpoint), CountsTrace()
        balancing = make_system(parallel)
        model = from_pretrained(checkpoint, make_mesh(parallel), balancing, compute_dtype=dtype, param_dtype=dtype)
        tokens = [words.tokens(text) for text in prompt]
        new = generate(model, tokens, max_new_tokens, sampling, end_tokens=words.end_tokens, tell=trace.add)
        for text, line in zip(prompt, new, strict=True):
            print(text + words.text(line))
        if record_counts is not None:
            trace.write(record_counts)
    except (OSError, ValueError) as error:
        say(f"error: {error}")
        raise typer.Exit(USER_ERRORS) from error


if __name__ == "__main__":
    app()
