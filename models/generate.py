"""Continue text with a checkpoint: `python -m models.generate --checkpoint DIR --prompt TEXT`."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from jax_moe_lb.cli.output import CheckedCommand, OutputPath
from jax_moe_lb.core import FileLimits
from jax_moe_lb.core.file_limits import parse_json, read_bytes
from jax_moe_lb.layer.systems import NAMES
from models.config import ParallelConfig
from models.console import USER_ERRORS, FileLimitsOption, say
from models.data.chat import MESSAGES_FIELD, ChatTemplate, conversation_in, read_variables
from models.data.tokenizers import decoded, encoded, end_tokens, read_tokenizer
from models.mesh import make_mesh, make_system, offer_cpu_devices
from models.pretrained.generation import Generator, Sampling
from models.pretrained.loading import from_pretrained
from models.run_folder.metrics import CountsTrace
from models.settings import in_section

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # last character of a text whose last character has further tokens


def _until(stop: list[str], text: str) -> str:
    """Return a text up to and excluding the first of the texts that end it."""
    return text[: min((at for at in map(text.find, stop) if at >= 0), default=len(text))]


class Printer:
    """Printer of a continuation."""

    def __init__(self, before: str, text_of: Callable[[list[int]], str], held: int) -> None:
        self.before, self.text_of, self.held, self.num_printed = before, text_of, held, 0

    def show(self, tokens: list[int], *, is_last: bool = False) -> None:
        """Print the part of the text that has not been printed; with `is_last` all of it and a line break."""
        text = self.before + self.text_of(tokens)
        until = len(text) if is_last else max(len(text.rstrip(INCOMPLETE)) - self.held, self.num_printed)
        print(text[self.num_printed : until], end="\n" if is_last else "", flush=True)
        self.num_printed = until


def _conversation(path: Path, limits: FileLimits) -> dict[str, Any]:
    """Read an object with messages, or a list of messages."""
    try:
        value = parse_json(read_bytes(path, limits), limits)
    except OSError as error:
        raise ValueError(f"messages is {str(path)!r}; expected a readable file: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"messages is {str(path)!r}; expected JSON: {error}") from error
    value = value if isinstance(value, dict) else {MESSAGES_FIELD: value}
    if MESSAGES_FIELD not in value:
        raise ValueError(f"messages is {str(path)!r}; expected an object with {MESSAGES_FIELD}, or a list of them")
    return value


def _check(texts: list[str], messages: Path | None, stop: list[str], stream: bool) -> None:
    if bool(texts) == (messages is not None):
        raise ValueError(f"prompt is {texts or None} and messages is {messages}; expected one of them")
    if "" in stop:
        raise ValueError("stop is ''; expected a text that is not empty")
    if stream and len(texts) > 1:
        raise ValueError(f"stream is set with {len(texts)} prompts; expected one")


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(cls=CheckedCommand)
def main(
    checkpoint: Annotated[Path, typer.Option(help="Folder with config.json, safetensors and tokenizer.json.")],
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; repeatable, as a batch.")] = None,
    messages: Annotated[
        Path | None, typer.Option(help="JSON file of a conversation to answer, with messages and tools.")
    ] = None,
    template_set: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Variable of the chat template; repeatable.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of new tokens per prompt.")] = 32,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 selects the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Cumulative probability of the tokens to sample from.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Number of most likely tokens to sample from; 0 for all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Least probability, as a fraction of the largest; 0 for none.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Penalty of earlier tokens; 1 for none.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends a continuation; repeatable.")] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text of one prompt as it is generated.")] = False,
    chat: Annotated[bool, typer.Option(help="Each prompt is a question in the checkpoint's chat template.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    system: Annotated[str, typer.Option(metavar="NAME[:KEY=VALUE]", help=f"Load-balancing system: {NAMES}.")] = "exact",
    data_parallel: Annotated[int, typer.Option(help="Data-parallel groups of ranks.")] = 1,
    expert_parallel: Annotated[int, typer.Option(help="Ranks per group; a divisor of the number of experts.")] = 8,
    dtype: Annotated[str, typer.Option(help="Dtype of parameters and products: float32 or bfloat16.")] = "float32",
    record_counts: Annotated[
        Path | None,
        typer.Option(metavar="TRACE.npz", help="Output file of the routing trace, for jax-moe-lb replay."),
        OutputPath(".npz"),
    ] = None,
    file_limits: FileLimitsOption = 1,
) -> None:
    """Print each prompt with its continuation, or with --chat or --messages the answer."""
    try:
        limits = FileLimits().scaled(file_limits)
        with in_section(""):
            parallel = ParallelConfig(data_parallel, expert_parallel, system)
            sampling = Sampling(temperature, top_p, top_k, min_p, repetition_penalty, seed)
        texts = prompt or []
        _check(texts, messages, stop or [], stream)
        is_chat = chat or messages is not None
        if template_set and not is_chat:
            raise ValueError(f"template_set is {template_set[0]!r}; expected --chat or --messages with it")
        asked = None
        if is_chat:
            template = ChatTemplate(checkpoint, limits, fixed=read_variables(template_set or ()))
            asked = [template.prompt([{"role": "user", "content": text}]) for text in texts]
            asked += [] if messages is None else [template.prompt(*conversation_in(_conversation(messages, limits)))]
        offer_cpu_devices(parallel.num_shards)
        tokenizer, trace = read_tokenizer(checkpoint / "tokenizer.json", limits), CountsTrace()
        mesh, balancing = make_mesh(parallel), make_system(parallel)
        model = from_pretrained(checkpoint, mesh, balancing, compute_dtype=dtype, param_dtype=dtype, limits=limits)
        tokens = [encoded(tokenizer, text) for text in texts] if asked is None else asked
        whole, until = partial(decoded, tokenizer), partial(_until, stop or [])
        held = max((len(text) - 1 for text in stop or ()), default=0)
        printers = [
            Printer(text, lambda line: until(whole(line)), held)
            for text in (texts if asked is None else [""] * len(asked))
        ]
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: say(f"warning: {message}")
            new = Generator(model)(
                tokens,
                max_new_tokens,
                sampling,
                end_tokens=end_tokens(checkpoint, limits),
                stop=(lambda line: until(whole(line)) != whole(line)) if stop else None,
                show=(lambda lines: printers[0].show(lines[0])) if stream else None,
                tell=trace.add,
            )
        for printer, line in zip(printers, new, strict=True):
            printer.show(line, is_last=True)
        if record_counts is not None:
            trace.write(record_counts)
    except (OSError, ValueError) as error:
        say(f"error: {error}")
        raise typer.Exit(USER_ERRORS) from error


if __name__ == "__main__":
    app()
