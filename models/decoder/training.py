"""These are the jitted parts of training a `StackedDecoder`: initial state and optimizer step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped

from jax_moe_lb import Stats, System, compiler_options
from models.decoder.config import DecoderConfig
from models.decoder.model import Decoder
from models.decoder.split import EXPERT_RULES
from models.decoder.stacked import StackedDecoder
from models.layers import KEPT
from models.optimizer import apply_gradients, make_optimizer
from models.parallel import placed_shapes, state_shardings
from models.presets import TrainConfig


@dataclass(frozen=True, eq=False)
class SplitPrograms:
    """These programs train a decoder of which every device holds a part.

    Args:
        graph: makes a model and its optimizer of a state, with `nnx.merge`.
        state_shapes: shapes and shardings of the state: parameters, optimizer, balancer.
        init: `() -> state`, for the first step.
        step: `(state, tokens) -> (state, loss, stats)`, which consumes the state; tokens are int32 `[B, T + 1]`.
    """

    graph: nnx.GraphDef
    state_shapes: nnx.State
    init: Callable[[], nnx.State]
    step: Wrapped


def make_split_programs(
    config: DecoderConfig, train: TrainConfig, mesh: Mesh, system: System, kept: Sequence[str] = KEPT
) -> SplitPrograms:
    """Builds the programs, compiling nothing.

    Args:
        config: the sizes of the model.
        train: the numbers of the run; the sizes of its own model are not used.
        mesh: what `models.parallel.make_mesh` made.
        system: the strategies that balance the load.
        kept: what is kept of a layer for the backward pass, see `StackedDecoder`.

    Raises:
        ValueError: the model does not fit the mesh.
    """

    def create() -> tuple[StackedDecoder, nnx.Optimizer]:
        decoder = Decoder(
            config,
            mesh=mesh,
            system=system,
            ranks_per_domain=train.parallel.ranks_per_domain,
            rules=EXPERT_RULES,
            rngs=nnx.Rngs(train.seed),
        )
        model = StackedDecoder(decoder, kept=tuple(kept))
        return model, nnx.Optimizer(model, make_optimizer(train), wrt=nnx.Param)

    graph, shapes = nnx.split(nnx.eval_shape(create))
    shardings = state_shardings(shapes, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def step(state: nnx.State, tokens: Array) -> tuple[nnx.State, Array, Stats]:
        model, optimizer = nnx.merge(graph, state)
        (loss, stats), gradients = nnx.value_and_grad(StackedDecoder.loss, has_aux=True)(model, tokens)
        apply_gradients(model, optimizer, gradients)
        return nnx.state((model, optimizer)), loss, stats

    return SplitPrograms(
        graph=graph,
        state_shapes=placed_shapes(shapes, shardings),
        init=jax.jit(lambda: nnx.state(create()), out_shardings=shardings),
        step=jax.jit(
            step,
            out_shardings=(shardings, everywhere, everywhere),
            donate_argnums=0,
            compiler_options=compiler_options(mesh),
        ),
    )
