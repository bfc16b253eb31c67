"""Fine-tune a checkpoint on text: `python -m models.finetune --checkpoint DIR --data FILE --out DIR`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from flax import nnx
from jax import Array
from jax.sharding import Mesh
from jax.stages import Wrapped

from jax_moe_lb import Stats, compiler_options, raise_on_fault
from jax_moe_lb.core import FileLimits
from jax_moe_lb.layer.systems import system_names
from models.architectures.config_json import Fields
from models.config import (
    COMPUTE_DTYPES,
    USER_ERRORS,
    BatchConfig,
    FileLimitsOption,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    say,
)
from models.data.chat import ChatTemplate, has_chat_template
from models.data.corpus import Corpus
from models.data.sources import corpus_from
from models.data.tokenizers import TokenizerFile, end_tokens
from models.decoder.model import Decoder
from models.mesh import make_mesh, make_system, offer_cpu_devices, place_batch, state_shardings
from models.pretrained.loading import from_pretrained
from models.pretrained.saving import check_vacant, save_pretrained
from models.run_folder.metrics import CountsTrace
from models.training.step import apply_gradients, decays_weights, further_loss, make_optimizer, packed_loss

DATA = "File or folder of text, JSON lines of text or messages, or token arrays, or PATH:WEIGHT; repeatable."

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True, eq=False)
class Tuning:
    """Programs to fine-tune one model.

    Args:
        state: initial parameters, optimizer and balancer state.
        step: `(state, tokens) -> (state, loss, stats)`; it donates the state.
        evaluate: `(state, tokens) -> loss`.
        model: function returning the model of a state.
    """

    state: nnx.State
    step: Wrapped
    evaluate: Callable[[nnx.State, Array], Array]
    model: Callable[[nnx.State], Decoder]


def make_tuning(
    model: Decoder, config: TrainConfig, mesh: Mesh, bias_rate: float = 0.0, further_weight: float = 0.0
) -> Tuning:
    """Build the programs, without compiling.

    Args:
        model: return value of `from_pretrained`.
        config: configuration of the run; its model section is not used.
        mesh: devices of the model.
        bias_rate: step size of the routing biases, see `MoE.update_bias`; 0 (default) leaves them unchanged.
        further_weight: weight of `further_loss`, for a model with multi-token prediction; 0 (default) omits it.
    """
    loss_of = partial(further_loss, weight=further_weight) if further_weight else packed_loss
    graph, state = nnx.split((model, nnx.Optimizer(model, make_optimizer(config, decays_weights), wrt=nnx.Param)))
    shardings = state_shardings(state, mesh)

    def step(state: nnx.State, tokens: Array) -> tuple[nnx.State, Array, Stats]:
        model, optimizer = nnx.merge(graph, state)
        (loss, stats), gradients = nnx.value_and_grad(loss_of, has_aux=True)(model, tokens)
        apply_gradients(model, optimizer, gradients)
        if bias_rate:
            _move_biases(model, stats, bias_rate)
        return nnx.state((model, optimizer)), loss, stats

    def evaluate(state: nnx.State, tokens: Array) -> Array:
        return packed_loss(nnx.merge(graph, state)[0], tokens)[0]

    options: dict[str, Any] = {"compiler_options": compiler_options(mesh)}
    return Tuning(
        state=jax.device_put(state, shardings),
        step=jax.jit(step, out_shardings=(shardings, None, None), donate_argnums=0, **options),
        evaluate=jax.jit(evaluate, **options),
        model=lambda state: nnx.merge(graph, state)[0],
    )


def _move_biases(model: Decoder, stats: Stats, rate: float) -> None:
    blocks = [*model.blocks, *(further.block for further in model.further)]
    layers = [block.moe for block in blocks if block.moe is not None]
    for i, moe in enumerate(layers):
        moe.update_bias(jax.tree.map(lambda leaf, i=i: leaf[i], stats), rate)


def tune(tuning: Tuning, corpus: Corpus, config: TrainConfig, mesh: Mesh, trace: CountsTrace) -> nnx.State:
    """Run all training steps; print progress, and the validation loss before and after. Return the final state."""
    sizes = (config.validation.batches, config.batch.size, config.batch.sequence_length)
    held_out = [place_batch(batch, mesh) for batch in corpus.validation_batches(*sizes)]
    state = tuning.state

    def validate() -> float:
        return float(np.mean([float(tuning.evaluate(state, batch)) for batch in held_out]))

    print(f"step 0: validation loss {validate():.4f}")
    for step in range(1, config.steps + 1):
        batch = corpus.batch(config.seed, step, config.batch.size, config.batch.sequence_length)
        state, loss, stats = tuning.step(state, place_batch(batch, mesh))
        raise_on_fault(stats)
        trace.add(stats)
        before, after = (float(np.mean(value)) for value in (stats.imbalance_before, stats.imbalance_after))
        if step % max(1, config.steps // 10) == 0:
            print(f"step {step}: loss {float(loss):.4f}, imbalance {before:.2f} -> {after:.2f}")
    print(f"step {config.steps}: validation loss {validate():.4f}")
    return state


@app.command()
def main(
    checkpoint: Annotated[Path, typer.Option(help="Folder with config.json, safetensors and tokenizer.json.")],
    data: Annotated[list[str], typer.Option(help=DATA)],
    out: Annotated[Path, typer.Option(help="Output folder of the tuned checkpoint; new or empty.")],
    system: Annotated[str, typer.Option(help=f"Load-balancing system: {', '.join(system_names())}.")] = "exact",
    data_parallel: Annotated[int, typer.Option(help="Data-parallel groups of ranks.")] = 1,
    expert_parallel: Annotated[int, typer.Option(help="Ranks per group; a divisor of the number of experts.")] = 8,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 100,
    batch_size: Annotated[int, typer.Option(help="Sequences per step, over all devices.")] = 8,
    sequence_length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 128,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-5,
    seed: Annotated[int, typer.Option(help="Seed of the batches.")] = 0,
    dtype: Annotated[str, typer.Option(help="Dtype of matrix products: float32 or bfloat16.")] = "float32",
    bias_rate: Annotated[float, typer.Option(help="Step size of the routing biases; 0 leaves them unchanged.")] = 0.0,
    further_weight: Annotated[
        float, typer.Option(help="Weight of the multi-token prediction loss, usually 0.3.")
    ] = 0.0,
    record_counts: Annotated[
        Path | None, typer.Option(help="Output file of the routing trace, for jax-moe-lb replay.")
    ] = None,
    file_limits: FileLimitsOption = 1,
) -> None:
    """Fine-tune all parameters of a checkpoint."""
    try:
        limits = FileLimits().scaled(file_limits)
        parallel = ParallelConfig(data_parallel, expert_parallel, system)
        batch, optimizer = BatchConfig(batch_size, sequence_length), OptimizerConfig(learning_rate)
        config = TrainConfig(parallel=parallel, batch=batch, optimizer=optimizer, steps=steps, seed=seed)
        check_vacant(out)
        offer_cpu_devices(parallel.num_shards)
        trace, ends = CountsTrace(), end_tokens(checkpoint, limits)
        tokenizer = TokenizerFile(checkpoint / "tokenizer.json", limits, ends[0] if ends else None)
        chat = ChatTemplate(checkpoint, limits) if has_chat_template(checkpoint, limits) else None
        corpus = corpus_from(data, tokenizer, limits=limits, chat=chat)
        corpus.check_length(sequence_length)
        mesh = make_mesh(parallel)
        if not 0 <= further_weight < float("inf"):
            raise ValueError(f"further_weight is {further_weight}; expected a finite number of at least 0")
        options: dict[str, Any] = {"compute_dtype": dtype, "scan_layers": True, "predict_further": further_weight > 0}
        model = from_pretrained(checkpoint, mesh, make_system(parallel), limits=limits, **options)
        if bias_rate and not model.config.router.selection_bias:
            raise ValueError(f"bias_rate is {bias_rate}; expected 0, as the model has no routing biases")
        tuning = make_tuning(model, config, mesh, bias_rate, further_weight)
        del model
        tuned = tuning.model(tune(tuning, corpus, config, mesh, trace))
        save_pretrained(tuned, out, dtype=_stored_dtype(tuned), keep_from=checkpoint)
        if record_counts is not None:
            trace.write(record_counts)
    except (OSError, ValueError) as error:
        say(f"error: {error}")
        raise typer.Exit(USER_ERRORS) from error


def _stored_dtype(model: Decoder) -> str:
    """Return the dtype of the source checkpoint; float32 if it is not supported."""
    raw = Fields(model.config.source).raw
    stored = raw.get("dtype", raw.get("torch_dtype"))
    return stored if stored in COMPUTE_DTYPES else "float32"


if __name__ == "__main__":
    app()
