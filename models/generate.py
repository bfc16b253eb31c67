"""Continue text with a checkpoint: `python -m models.generate --checkpoint DIR --prompt TEXT`."""

from pathlib import Path
from typing import Annotated

import typer

from jax_moe_lb.core import FileLimits
from jax_moe_lb.layer.systems import system_names
from models.config import USER_ERRORS, FileLimitsOption, ParallelConfig, say
from models.data.chat import ChatTemplate
from models.data.tokenizers import CheckpointTokenizer
from models.mesh import make_mesh, make_system, offer_cpu_devices
from models.pretrained.generation import Sampling, generate
from models.pretrained.loading import from_pretrained
from models.run_folder.metrics import CountsTrace

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    checkpoint: Annotated[Path, typer.Option(help="Folder with config.json, safetensors and tokenizer.json.")],
    prompt: Annotated[list[str], typer.Option(help="Text to continue; repeatable, as a batch.")],
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of new tokens per prompt.")] = 32,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 selects the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Cumulative probability of the tokens to sample from.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Number of most likely tokens to sample from; 0 for all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Least probability, as a fraction of the largest; 0 for none.")] = 0.0,
    chat: Annotated[bool, typer.Option(help="Each prompt is a question in the checkpoint's chat template.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    system: Annotated[str, typer.Option(help=f"Load-balancing system: {', '.join(system_names())}.")] = "exact",
    data_parallel: Annotated[int, typer.Option(help="Data-parallel groups of ranks.")] = 1,
    expert_parallel: Annotated[int, typer.Option(help="Ranks per group; a divisor of the number of experts.")] = 8,
    dtype: Annotated[str, typer.Option(help="Dtype of parameters and products: float32 or bfloat16.")] = "float32",
    record_counts: Annotated[
        Path | None, typer.Option(help="Output file of the routing trace, for jax-moe-lb replay.")
    ] = None,
    file_limits: FileLimitsOption = 1,
) -> None:
    """Print each prompt with its continuation, or with --chat the answer to each question."""
    try:
        limits = FileLimits().scaled(file_limits)
        parallel = ParallelConfig(data_parallel, expert_parallel, system)
        sampling = Sampling(temperature, top_p, top_k, min_p, seed)
        template = ChatTemplate(checkpoint, limits) if chat else None
        offer_cpu_devices(parallel.num_shards)
        words, trace = CheckpointTokenizer(checkpoint, limits), CountsTrace()
        balancing = make_system(parallel)
        model = from_pretrained(
            checkpoint, make_mesh(parallel), balancing, compute_dtype=dtype, param_dtype=dtype, limits=limits
        )
        tokens = [words.tokens(text) if template is None else template.question(text) for text in prompt]
        new = generate(model, tokens, max_new_tokens, sampling, end_tokens=words.end_tokens, tell=trace.add)
        for text, line in zip(prompt, new, strict=True):
            print(words.text(line) if chat else text + words.text(line))
        if record_counts is not None:
            trace.write(record_counts)
    except (OSError, ValueError) as error:
        say(f"error: {error}")
        raise typer.Exit(USER_ERRORS) from error


if __name__ == "__main__":
    app()
