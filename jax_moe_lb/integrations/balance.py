"""`balance` replaces the MoE blocks of a model of another library."""

import importlib
import re
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh

from jax_moe_lb.core.topology import Topology, home_experts_per_rank
from jax_moe_lb.integrations.blocks import Adapter, BlockConfig
from jax_moe_lb.layer.arguments import check_system, check_types
from jax_moe_lb.layer.systems import System, system_named
from jax_moe_lb.nn.moe import check_mesh, resolve_system

Model = TypeVar("Model", bound=nnx.Module)

ADAPTERS = {
    ("maxtext.layers.moe", "RoutedMoE"): "jax_moe_lb.integrations.maxtext",
    ("easydel.layers.moe._moe_module", "BaseMoeModule"): "jax_moe_lb.integrations.easydel",
    ("tunix.models.qwen3.model", "MoELayer"): "jax_moe_lb.integrations.tunix",
}
"""Module of the adapter per supported block, by the block's module and class. Subclasses count as their base."""

_SUPPORTED = ", ".join(map(".".join, ADAPTERS))
_BLOCK_NAME = re.compile("moe|experts", re.IGNORECASE)


def balance(
    model: Model,
    *,
    mesh: Mesh,
    system: System | str = "exact",
    topology: Topology | None = None,
    record_stats: bool = False,
) -> Model:
    """Replace the MoE blocks of a Flax NNX model of another library by balanced ones.

    Supported blocks: MaxText's `RoutedMoE`, EasyDeL's subclasses of `BaseMoeModule` and Tunix' `MoELayer`. The blocks
    are changed in place: each gets a subclass of its class, with the same parameters and paths. So checkpoints,
    optimizers and references to the model stay valid. The library still computes routing and router losses; outputs
    and gradients equal those of the unchanged block.

    Args:
        model: model, or one block.
        mesh: mesh of the model, with Auto axes.
        system: balancer, weight transport and token dispatch: a `System`, or the text as in `MoE`; "exact" by default.
            Its balancer must have no state between steps.
        topology: expert, data and tensor axes of the blocks; by default those over which the library shards experts.
        record_stats: if True, each call sets the attributes `moe_stats` of a block, its `Stats`, for `raise_on_fault`,
            and `moe_experts`, the experts `[..., K]` per token. Take these `nnx.Intermediate`s by
            `nnx.pop(model, nnx.Intermediate)`. False by default.

    Returns:
        The model.

    Raises:
        ValueError: the model has no supported block, or a block has an unsupported feature; the error names the block.
            No block is changed then.
        TypeError: an argument has another type.

    Examples:
        Call it after the model is built or loaded, and before `nnx.jit` or `nnx.split`:

        >>> import jax
        >>> from jax.sharding import AxisType
        >>> from flax import nnx
        >>> import jax_moe_lb
        >>> mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> jax_moe_lb.balance(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), mesh=mesh)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: model is a Linear without MoE blocks; expected one or more of maxtext.layers.moe.RoutedMoE, ...
    """
    check_types(model=(model, nnx.Module), mesh=(mesh, Mesh))
    check_system(system)
    check_types(topology=(topology, Topology | None), record_stats=(record_stats, bool))
    system = system_named(system) if isinstance(system, str) else system
    if topology is not None:
        check_mesh(mesh, topology)
    if AxisType.Explicit in mesh.axis_types:
        auto = ", ".join(["AxisType.Auto"] * len(mesh.axis_types))
        raise ValueError(
            f"mesh has the axis types {mesh.axis_types}; expected AxisType.Auto for each. "
            f"Pass axis_types=({auto},) to jax.make_mesh."
        )
    configured: list[tuple[Any, Adapter, BlockConfig]] = []
    for name, block, adapter in _blocks(model):
        adapter.check(block, name)
        axes = adapter.topology(block, mesh, name) if topology is None else topology
        settings = _system(system, adapter.num_experts(block), axes)
        configured.append((block, adapter, BlockConfig(mesh, axes, settings, record_stats)))
    if not configured:
        raise ValueError(
            f"model is a {type(model).__name__} without MoE blocks; expected one or more of {_SUPPORTED}. "
            "Replace other blocks by jax_moe_lb.MoE."
        )
    for block, adapter, config in configured:
        original = getattr(type(block), "unbalanced", type(block))
        balanced = adapter.balanced(original)
        balanced.__name__, balanced.__qualname__ = original.__name__, original.__qualname__
        balanced.unbalanced = original  # type: ignore[attr-defined]
        block.balance_config = config
        # NNX stores attributes that are set the usual way in the module's dictionary.
        object.__setattr__(block, "__class__", balanced)
    return model


def _blocks(model: nnx.Module) -> list[tuple[str, Any, Adapter]]:
    modules = list(nnx.iter_modules(model))
    found = {path: (block, adapter) for path, block in modules if (adapter := _adapter(type(block))) is not None}
    for path, module in modules:
        inside = any(path[: len(outer)] == outer for outer in found)
        if not inside and _holds_experts(module):
            kind = f"{type(module).__module__}.{type(module).__qualname__}"
            raise ValueError(f"{_name(path)} is a {kind}; expected one of {_SUPPORTED}")
    return [(_name(path), block, adapter) for path, (block, adapter) in found.items()]


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(("model", *map(str, path)))


def _adapter(cls: type) -> Adapter | None:
    for base in cls.__mro__:
        if module := ADAPTERS.get((base.__module__, base.__name__)):
            return importlib.import_module(module).ADAPTER
    return None


def _holds_experts(block: nnx.Module) -> bool:
    """Return True if a module is, by name and the shapes of the variables, an MoE block."""
    if type(block).__module__.startswith("jax_moe_lb.") or not _BLOCK_NAME.search(type(block).__name__):
        return False
    own = (value for value in vars(block).values() if isinstance(value, nnx.Variable))
    return any(getattr(leaf, "ndim", 0) >= 3 for value in own for leaf in jax.tree.leaves(value))


def _system(system: System | str, num_experts: int, topology: Topology) -> System:
    home_experts_per_rank(num_experts, topology.num_ranks)
    resolved = resolve_system(system, num_experts, None, topology)
    for name, value in (("migrate", resolved.migrate), ("relocates", resolved.relocates or None)):
        if value is not None:
            raise ValueError(f"system.{name} is {value}; expected None or False, for blocks of other libraries")
    if jax.tree.leaves(resolved.balancer.init((topology.num_ranks, num_experts))):
        kind = type(resolved.balancer).__name__
        raise ValueError(f"system.balancer is {kind}; expected a balancer without state between steps")
    return resolved
