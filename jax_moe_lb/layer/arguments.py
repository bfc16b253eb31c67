"""Checks of the arguments of `moe` and `nn.MoE`: errors of one line, before anything is traced."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.core.checks import Natural, accepts, check_array, check_value, shown
from jax_moe_lb.core.experts import LOGICAL_AXES, Experts
from jax_moe_lb.core.manual_axes import varying_axes
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.layer.system import System
from jax_moe_lb.routing.routers import Router, RouterFunction, Routing, TokenInfo, router_options
from jax_moe_lb.transport.expert_domains import GatherExpertDomain

TOKEN_DTYPES = (jnp.bfloat16, jnp.float32, jnp.float64)
"""Supported dtypes of tokens; the custom calls and the accelerator kernels have no versions for others."""


def check_types(**arguments: tuple[Any, Any]) -> None:
    """Check arguments, each a pair of value and type, by name."""
    for name, (value, kind) in arguments.items():
        check_value(name, value, kind)


def check_system(system: Any) -> None:
    """Check the type of a system; the error has the remedy for a balancer and a function."""
    try:
        check_value("system", system, System | str)
    except TypeError as error:
        remedy = ""
        if isinstance(system, Balancer):
            remedy = f". Pass System({type(system).__name__}(), replica_slots=2)."
        elif callable(system):
            remedy = ". Call the function, as in exact()."
        raise TypeError(f"{error}{remedy}") from error


def check_router(router: RouterFunction, num_experts: int) -> None:
    """Check that a router is a function of three arguments, with at most as many experts per token as there are."""
    if isinstance(router, type):
        raise TypeError(f"router is the class {router.__name__}; expected an instance, such as TopK(2)")
    try:
        hash(router)
    except TypeError as error:
        raise TypeError(
            f"router is {shown(router)}; expected a hashable function, as it is static in programs"
        ) from error
    if not callable(router) or not accepts(router, 3):
        raise TypeError(
            f"router is {shown(router)}; expected a function of logits, bias and token properties, such as TopK(2)"
        )
    per_token = getattr(router, "num_experts_per_tok", 1)
    if isinstance(per_token, int) and per_token > num_experts:
        raise ValueError(f"router.num_experts_per_tok is {per_token}; expected at most {num_experts}, all experts")
    if isinstance(router, Router) and type(router).__module__.startswith("jax_moe_lb."):
        # Their own checks, before the first step. A user's router may have collectives, which fail here.
        one = TokenInfo(ids=jnp.zeros((1,), jnp.int32))
        try:
            jax.eval_shape(router, jax.ShapeDtypeStruct((1, num_experts), jnp.float32), None, one)
        except ValueError as error:
            raise ValueError(f"router.{error}") from error


def check_routing(routing: Any, logits: Array) -> None:
    """Check the return value of a router."""
    if not isinstance(routing, Routing):
        raise TypeError(f"router returned {shown(routing)}; expected a Routing of experts, weights, logits and scores")
    num_tokens = logits.shape[0]
    check_array("router's experts", routing.experts, (num_tokens, None), jnp.integer)
    check_array("router's weights", routing.weights, routing.experts.shape, jnp.floating)
    for name in ("logits", "scores"):
        check_array(f"router's {name}", getattr(routing, name), logits.shape, jnp.floating)


def check_tokens(x: Any, shape: tuple[Any, ...], key: Any, properties: dict[str, Any], owner: str = "") -> None:
    """Check tokens and their properties, arguments or fields of an `owner` by name."""
    check_array("x", x, shape, jnp.floating)
    kinds = {"mask": jnp.bool_, "weights": jnp.floating}
    for name, value in properties.items():
        if value is not None:
            of_token = ("K",) if name in ("experts", "weights") else ()
            check_array(f"{owner}{name}", value, (*x.shape[:-1], *of_token), kinds.get(name, jnp.integer))
    if key is not None and not _is_key(key):
        raise TypeError(f"key is {shown(key)}; expected a random key, such as jax.random.key(0)")


def _is_key(key: Any) -> bool:
    if not isinstance(key, Array):
        return False
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key.ndim == 0
    # Keys of `jax.random.PRNGKey` are a vector of integers.
    return key.dtype == jnp.uint32 and key.ndim == 1


def check_arguments(
    x: Any,
    params: Any,
    router: RouterFunction,
    migrate: GatherExpertDomain | None,
    topology: Topology,
    homes: Any,
    tokens: TokenInfo,
) -> None:
    """Check the arguments of `moe` against each other."""
    check_parameters(params, router_options(router), topology, migrate.domains.domain_size if migrate else 1)
    check_router(router, params.router.shape[1])
    if homes is not None:
        check_array("state.homes", homes, (params.router.shape[1],), jnp.integer)
    arrays = ("mask", "ids", "segments", "position", "experts", "weights")
    check_tokens(x, ("T", "H"), tokens.key, {name: getattr(tokens, name) for name in arrays}, "tokens.")
    check_value("tokens.num_segments", tokens.num_segments, Natural | None)
    if x.dtype not in TOKEN_DTYPES:
        raise ValueError(f"x has dtype {x.dtype}; expected bfloat16, float32 or float64")
    width, experts_width = params.router.shape[0], params.experts.up.shape[1]
    if x.shape[1] != width or experts_width != width:
        raise ValueError(
            f"x has width {x.shape[1]} and experts.up {experts_width}; expected {width}, as in the router's kernel"
        )
    check_experts(params.experts, x.dtype)


def check_experts(experts: Experts, dtype: Any) -> None:
    """Check the shapes and dtypes of experts, whose first projection is `[L, H, F]`, or `[L, H, 2 F]` with the gate."""
    num_home, width, columns = experts.up.shape
    sizes = {"embed": width, "mlp": columns // 2 if experts.gate is None and experts.is_fused else columns, None: None}
    for name, axes in LOGICAL_AXES.items():
        array, shape = getattr(experts, name), [num_home, *(sizes[axis] for axis in axes)]
        if name in ("up", "up_bias", "up_b"):
            shape[-1] = columns
        if array is not None:
            check_array(f"params.experts.{name}", array, tuple(shape), jnp.floating)
            if array.dtype != dtype:
                raise ValueError(f"params.experts.{name} has dtype {array.dtype}; expected {dtype}, as x")


def check_parameters(params: Any, options: Router, topology: Topology, domain_size: int) -> None:
    """Check the parameters of a rank."""
    check_array("params.router", params.router, (None, None), jnp.floating)
    num_experts = params.router.shape[1]
    for name in ("logit_bias", "selection_bias"):
        bias = getattr(params, name)
        if bias is None and getattr(options, name):
            raise ValueError(f"params.{name} is None; expected [E], as router.{name} is True")
        if bias is not None:
            check_array(f"params.{name}", bias, (num_experts,), jnp.floating)
    check_value("params.experts", params.experts, Experts)
    check_array("params.experts.up", params.experts.up, (None, None, None), jnp.floating)
    home = params.experts.up.shape[0] * domain_size
    if home * topology.num_ranks != num_experts:
        raise ValueError(
            f"experts holds {home} experts on each of {topology.num_ranks} ranks; "
            f"expected {num_experts} in all, as in the router's kernel"
        )


def check_axes(x: Array, topology: Topology) -> None:
    """Check the mesh axes of a topology inside `jax.shard_map`."""
    if not topology.expert_axes:
        raise ValueError("topology has no expert_axes; expected one made by Topology.from_mesh")
    try:
        ranks = math.prod(jax.lax.axis_size(axis) for axis in topology.expert_axes)
        for axis in topology.data_axes + topology.tensor_axes:
            jax.lax.axis_size(axis)
    except NameError as error:
        axes = topology.expert_axes + topology.data_axes + topology.tensor_axes
        raise ValueError(f"topology has the axes {axes}; expected axes of a jax.shard_map around moe") from error
    if ranks != topology.num_ranks:
        raise ValueError(
            f"topology has {topology.num_ranks} ranks; expected the {ranks} of mesh axes {topology.expert_axes}"
        )
    if split := sorted(varying_axes(x) & set(topology.tensor_axes)):
        raise ValueError(f"x differs between shards of {split}; expected equal tokens on all of topology.tensor_axes")
