"""`compile_layer` compiles one mixture-of-experts layer for a target."""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jax_moe_lb.aot.compile import compile_for
from jax_moe_lb.aot.report import ProgramReport
from jax_moe_lb.aot.targets import Target
from jax_moe_lb.core.stats import Stats
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import State, Tokens
from jax_moe_lb.kernels.experts import Experts
from jax_moe_lb.layer.moe import moe
from jax_moe_lb.layer.systems import System
from jax_moe_lb.routing.routers import TopK

LETTERS = {"H": "hidden", "F": "inner", "E": "experts", "T": "tokens", "K": "per_token"}
EXPECTED_SIZES = "some of H, F, E, T and K, such as H=2048,F=768,E=128,T=4096,K=8"
MOST = 2**31 - 1

BACKWARD = 3
"""A forward and backward pass is ideally three forward passes: a product has two gradients."""


@dataclass(frozen=True)
class LayerSizes:
    """These are the sizes of a layer; the defaults are those of Qwen3-30B-A3B at 4096 tokens per rank.

    Args:
        hidden: `H`, the width of the model.
        inner: `F`, the inner width of an expert.
        experts: `E`, the experts of the layer.
        tokens: `T`, the tokens of a rank.
        per_token: `K`, the experts of a token.

    Examples:
        >>> from jax_moe_lb.aot import LayerSizes
        >>> LayerSizes.parse("E=64,T=1024")
        LayerSizes(hidden=2048, inner=768, experts=64, tokens=1024, per_token=8)
    """

    hidden: int = 2048
    inner: int = 768
    experts: int = 128
    tokens: int = 4096
    per_token: int = 8

    @classmethod
    def parse(cls, text: str) -> "LayerSizes":
        """Reads sizes, of which those that are not given stay at their defaults.

        Args:
            text: such as `H=2048,F=768,E=128,T=4096,K=8`.

        Raises:
            ValueError: a letter is unknown or comes twice, or a size is no integer from 1 on.
        """
        given: dict[str, int] = {}
        for part in text.split(","):
            found = re.fullmatch(r"([HFETK])=(0*[1-9]\d{0,9})", part.strip(), re.ASCII)
            if found is None or LETTERS[found[1]] in given or int(found[2]) > MOST:
                raise ValueError(f"sizes is {text[:100]!r}; expected {EXPECTED_SIZES}")
            given[LETTERS[found[1]]] = int(found[2])
        return dataclasses.replace(cls(), **given)

    @property
    def by_letter(self) -> dict[str, int]:
        """Gives the sizes by their letters."""
        return {letter: getattr(self, name) for letter, name in LETTERS.items()}

    @property
    def ideal_flops(self) -> int:
        """Counts the operations of a rank in a forward pass: of its token copies, and of the router."""
        copies = 3 * self.per_token * self.inner
        return 2 * self.tokens * self.hidden * (copies + self.experts)


def compile_layer(
    system: System,
    target: Target,
    sizes: LayerSizes = LayerSizes(),
    *,
    gradients: bool = False,
    fused: bool = False,
    dtype: Any = jnp.bfloat16,
    options: Mapping[str, str | bool] | None = None,
) -> ProgramReport:
    """Compiles a layer for a target, on all of its devices as one expert-parallel group.

    Args:
        system: what `systems.py` makes, or your own.
        target: the machine.
        sizes: the sizes of the layer.
        gradients: whether to compile the gradients of the sum of squared outputs, too.
        fused: whether the experts' gates are in `up`, see `Experts`.
        dtype: of tokens and weights.
        options: options of XLA's compiler for this program, by their names without dashes, over those of
            `compiler_options`.

    Raises:
        ValueError: the sizes do not fit the machine, or `compile_for` refuses the program.

    Examples:
        Where `jax_moe_lb[cuda]` is installed:

        >>> from jax_moe_lb import exact
        >>> from jax_moe_lb.aot import Target, compile_layer, use_no_accelerators
        >>> use_no_accelerators()  # doctest: +SKIP
        >>> compile_layer(exact(), Target.parse("h100:1x8")).fits  # doctest: +SKIP
        True
    """
    mesh = target.mesh()
    _check(sizes, mesh)
    topology = Topology.from_mesh(mesh, mesh.axis_names, rails_per_node=mesh.shape["expert"])
    layer = partial(_layer, per_token=sizes.per_token, system=system, topology=topology)
    specs = (PartitionSpec(mesh.axis_names), PartitionSpec(), PartitionSpec(mesh.axis_names), PartitionSpec())
    out_specs = (PartitionSpec(mesh.axis_names), PartitionSpec(), PartitionSpec())
    run = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=out_specs)
    program = jax.jit(_with_gradients(run) if gradients else run)
    ideal_flops = sizes.ideal_flops * (BACKWARD if gradients else 1)
    args = _arguments(sizes, system, mesh, specs, dtype, fused)
    return compile_for(target, program, args, mesh, ideal_flops=ideal_flops, options=options)


def _layer(
    x: Tokens,
    kernel: Float[Array, "H E"],
    experts: Experts,
    state: State,
    *,
    per_token: int,
    system: System,
    topology: Topology,
) -> tuple[Tokens, Stats, State]:
    return moe(x, kernel, experts, TopK(per_token), system, topology, state=state, checks="deferred")


def _with_gradients(run: Any) -> Any:
    def loss(x: Tokens, kernel: Float[Array, "H E"], experts: Experts, state: State) -> Any:
        y, *others = run(x, kernel, experts, state)
        # Squared, so that the upstream gradient is no constant, and comes after the outputs.
        return jnp.square(y.astype(jnp.float32)).sum(), others

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)


def _arguments(
    sizes: LayerSizes, system: System, mesh: Mesh, specs: tuple[PartitionSpec, ...], dtype: Any, fused: bool
) -> tuple[Any, ...]:
    def make() -> tuple[Array, Array, Experts, State]:
        up = jnp.zeros((sizes.experts, sizes.hidden, sizes.inner), dtype)
        experts = Experts(up, up.mT, up)
        experts = experts.fused() if fused else experts
        x = jnp.zeros((mesh.size * sizes.tokens, sizes.hidden), dtype)
        kernel = jnp.zeros((sizes.hidden, sizes.experts), dtype)
        return x, kernel, experts, system.balancer.init((mesh.size, sizes.experts))

    def place(spec: PartitionSpec, like: Any) -> Any:
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=NamedSharding(mesh, spec))

    # Only shapes: nothing is made.
    args = jax.eval_shape(make)
    return tuple(jax.tree.map(partial(place, spec), arg) for spec, arg in zip(specs, args, strict=True))


def _check(sizes: LayerSizes, mesh: Mesh) -> None:
    if sizes.experts % mesh.size:
        raise ValueError(f"E is {sizes.experts}; expected a multiple of the target's {mesh.size} devices")
    if sizes.per_token > sizes.experts:
        raise ValueError(f"K is {sizes.per_token}; expected at most E, {sizes.experts}")
    largest = max(math.prod((mesh.size, sizes.tokens, sizes.per_token)), sizes.tokens * sizes.hidden)
    if largest > MOST:
        raise ValueError(f"T is {sizes.tokens}; expected at most {MOST} token copies of all ranks")
