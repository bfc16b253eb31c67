"""`jax.export` of programs with layers: serialization of statistics, and the custom calls."""

import importlib
import json
from typing import Any

import jax
from jax.export import DisabledSafetyCheck

from jax_moe_lb.core.custom_calls import MODULES, is_built, register
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.split import Split
from jax_moe_lb.core.stats import Fault, Stats


def prepare_export() -> list[DisabledSafetyCheck]:
    """Register statistics and custom calls for `jax.export`, and return its checks to disable.

    Call it before `jax.export.export`, and in the process that deserializes. The result permits the custom calls of
    this package. They have no compatibility guarantees: run the program with the version of the package that exported
    it, on the same platform, with equally many devices.

    Serialization requires the package `flatbuffers`. A program with a `HostCallback` cannot be serialized.

    Returns:
        The argument `disabled_checks` of `jax.export.export`.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec
        >>> from jax_moe_lb import ExpertConfig, MoE, TopK
        >>> from jax_moe_lb.core import prepare_export
        >>> mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> layer = MoE(8, 4, TopK(2), mesh=mesh, experts=ExpertConfig(16), rngs=nnx.Rngs(0))
        >>> x = jax.device_put(jnp.ones((6, 8)), NamedSharding(mesh, PartitionSpec()))
        >>> exported = jax.export.export(jax.jit(lambda x: layer(x)), disabled_checks=prepare_export())(x)
        >>> _, stats = jax.jit(jax.export.deserialize(exported.serialize()).call)(x)
        >>> int(stats.counts.sum())
        12
    """
    _register_statistics()
    register()
    built = [importlib.import_module(module) for platform, module in MODULES.items() if is_built(platform)]
    targets = sorted({target for module in built for target in module.registrations()["handlers"]})
    return [DisabledSafetyCheck.custom_call(target) for target in targets]


def _register_statistics() -> None:
    for cls, write, read in ((Stats, _nothing, _none), (Fault, _host_errors, _none_of_host), (Plan, _plan, _plan_of)):
        try:
            jax.export.register_pytree_node_serialization(
                cls, serialized_name=f"jax_moe_lb.{cls.__name__}", serialize_auxdata=write, deserialize_auxdata=read
            )
        except ValueError:
            # Registered by an earlier call.
            return


def _nothing(static: tuple[()]) -> bytes:
    return b""


def _none(content: bytes) -> tuple[()]:
    return ()


def _host_errors(static: tuple[Any]) -> bytes:
    if static[0]:
        raise ValueError("the program calls a HostCallback; expected none, as it cannot be serialized")
    return b""


def _none_of_host(content: bytes) -> tuple[Any]:
    return ((),)


def _plan(static: tuple[int, Split]) -> bytes:
    domain, split = static
    return json.dumps([domain, split.tier, split.locality]).encode()


def _plan_of(content: bytes) -> tuple[int, Split]:
    domain, tier, locality = json.loads(content)
    return domain, Split(tier, locality)
