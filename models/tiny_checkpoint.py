"""Write a small random checkpoint: `python -m models.tiny_checkpoint --architecture mixtral --out DIR`.

It replaces a real checkpoint in tests and examples. Its vocabulary is the 256 bytes.
"""

import json
from pathlib import Path
from typing import Annotated

import typer
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jax_moe_lb import System
from jax_moe_lb.cli.output import CheckedCommand, OutputPath
from jax_moe_lb.core.checks import Natural, check_value
from models.architectures.config_json import Fields
from models.architectures.registry import ARCHITECTURES, TABLES, configured
from models.config import ParallelConfig
from models.console import USER_ERRORS, say
from models.decoder.model import Decoder
from models.mesh import make_mesh, offer_cpu_devices
from models.pretrained.saving import save_pretrained
from models.run_folder.files import write_whole

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def tiny_config(architecture: str) -> str:
    """Return the `config.json` of a small model."""
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture is {architecture!r}; expected one of {', '.join(sorted(ARCHITECTURES))}")
    row = ARCHITECTURES[architecture]
    named = {"model_type": architecture, "architectures": [row.class_name]}
    return json.dumps({**named, **TABLES["tiny"], **row.tiny}, indent=2)


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose vocabulary is the 256 bytes."""
    words = {word: number for number, word in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_tiny(architecture: str, folder: Path, seed: int = 0) -> None:
    """Write a small random checkpoint with its tokenizer into an absent or empty folder."""
    check_value("seed", seed, Natural)
    config = configured(Fields(tiny_config(architecture)))
    mesh = make_mesh(ParallelConfig(expert_parallel=1))
    save_pretrained(Decoder(config, mesh=mesh, system=System(), rngs=nnx.Rngs(seed)), folder)
    write_whole(folder / "tokenizer.json", byte_tokenizer().to_str().encode())


@app.command(cls=CheckedCommand)
def main(
    architecture: Annotated[str, typer.Option(help=f"Architecture: {', '.join(sorted(ARCHITECTURES))}.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Output folder; new or empty."), OutputPath("")],
    seed: Annotated[int, typer.Option(help="Seed of the parameters.")] = 0,
) -> None:
    """Write a small random checkpoint in the format of transformers."""
    try:
        offer_cpu_devices(1)
        write_tiny(architecture, out, seed)
    except (OSError, ValueError) as error:
        say(f"error: {error}")
        raise typer.Exit(USER_ERRORS) from error


if __name__ == "__main__":
    app()
