"""The Flax layer `MoE`: parameters, balancer state and a call of `moe` over a mesh."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from jax_moe_lb.core.checks import check_integer, check_value, shown
from jax_moe_lb.core.experts import ADAPTERS, Experts
from jax_moe_lb.core.stats import Stats, raise_if_concrete
from jax_moe_lb.core.topology import Topology, home_experts_per_rank
from jax_moe_lb.layer.arguments import check_router, check_system, check_tokens, check_types
from jax_moe_lb.layer.systems import System, system_named
from jax_moe_lb.nn.config import ExpertConfig, Precision, SharedExpert
from jax_moe_lb.nn.sharding import (
    LayerConfig,
    LayerInputs,
    LogicalAxisRules,
    Parameters,
    add_shared,
    expert_axes,
    expert_specs,
    fsdp_axes,
    logical_axis_rules,
    sharded_known,
    sharded_moe,
    sharded_residual,
)
from jax_moe_lb.nn.tokens import GivenTokens, TokenLayout, axis_names, place, token_layout
from jax_moe_lb.nn.variables import (
    BalancerState,
    CodecState,
    ExpertHomes,
    GradientResidual,
    RouterBias,
    RunningLoads,
)
from jax_moe_lb.routing.losses import Losses
from jax_moe_lb.routing.routers import RouterFunction, router_options, updated_bias
from jax_moe_lb.transport.expert_domains import GatherExpertDomain
from jax_moe_lb.transport.fsdp import FsdpExperts

# Stack level of warnings at the caller of a module: Flax's metaclass has three frames above `__init__`.
CALLER = 5


class MoE(nnx.Module):
    """A dropless mixture-of-experts layer with load-balanced expert parallelism.

    Use it in place of the feed-forward network of a transformer block. Call it outside `jax.shard_map`, with the tokens
    of all ranks. It contains the parameters, the routing bias and the balancer state. The expert weights are sharded
    over the expert axes. A caller may add adapters (LoRA) as parameters `up_a`, `up_b` and so on, see `Experts`.

    Args:
        embed_dim: `H`, the width of the model.
        num_experts: `E`, a multiple of the number of expert-parallel ranks.
        router: `TopK`, another router of `jax_moe_lb.routing`, or a function like them. Its `selection_bias`,
            `logit_bias` and `capacity_factor` are options of the layer, see `Router`.
        mesh: mesh of the expert and data axes, Auto or Explicit. The layer may run inside a `jax.shard_map` over
            further axes, such as pipeline stages. For gradients there, JAX 0.12 requires `check_vma=False`.
        topology: return value of `Topology.from_mesh(mesh, ...)`; if the system has `migrate`, its `domains.between`.
            `None` (default) uses these, without further options.
        system: balancer, weight transport and token dispatch: a `System` such as `exact(4)`, or its text as for
            `systems.system_named`, such as "exact:replica_slots=4". "exact" (default) balances with 2 replica slots per
            rank; "plain" does not balance. At most `E - L` slots are used. `transport.dispatch_by_rule` chooses the
            dispatch, unless one is given.
        experts: inner width, activation and biases of the experts.
        shared: expert applied to every token; `None` (default) for none.
        losses: coefficients of the router losses; add `router_loss` of the statistics to the loss of the model.
        precision: dtypes of arithmetic, parameters and exchanges.
        kernel_init: initializer of all kernels.
        rules: table from logical to mesh axes; `None` (default) uses `logical_axis_rules(topology, system.migrate)`.
        rngs: random number generators for the parameters.

    Warns:
        UserWarning: the system cannot balance this layer, or the router kernel has no gradient (`HashRouter`).

    Raises:
        ValueError: `num_experts` is no multiple of the number of ranks, the topology does not match the mesh, or the
            system relocates experts with a balancer that stores loads by place.
        TypeError: an argument has another type.

    Examples:
        Two ranks, each with half of the tokens and half of the experts:

        >>> import jax
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jax.sharding import AxisType
        >>> from jax_moe_lb import ExpertConfig, MoE, TopK
        >>> mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> layer = MoE(8, 4, TopK(2), mesh=mesh, experts=ExpertConfig(16), rngs=nnx.Rngs(0))
        >>> y, stats = layer(jnp.ones((6, 8)))
        >>> y.shape, int(stats.counts.sum())
        ((6, 8), 12)
    """

    def __init__(
        self,
        embed_dim: int,
        num_experts: int,
        router: RouterFunction,
        *,
        mesh: Mesh,
        topology: Topology | None = None,
        system: System | str = "exact",
        experts: ExpertConfig,
        shared: SharedExpert | None = None,
        losses: Losses = Losses(),
        precision: Precision = Precision(),
        kernel_init: nnx.Initializer = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", batch_axis=(0,)),
        rules: LogicalAxisRules | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        check_integer("embed_dim", embed_dim)
        check_integer("num_experts", num_experts)
        check_types(
            mesh=(mesh, Mesh),
            topology=(topology, Topology | None),
            experts=(experts, ExpertConfig),
            shared=(shared, SharedExpert | None),
            losses=(losses, Losses),
            precision=(precision, Precision),
            kernel_init=(kernel_init, Callable),
            rules=(rules, tuple | list | None),
            rngs=(rngs, nnx.Rngs),
        )
        check_system(system)
        check_router(router, num_experts)
        _check_rules(rules)
        system = system_named(system) if isinstance(system, str) else system
        migrate = system.migrate
        if topology is None:
            topology = migrate.domains.between if migrate else _default_topology(mesh)
        if migrate is not None and migrate.domains.between != topology:
            raise ValueError(
                "topology differs from system.migrate.domains.between; expected the same topology, or None"
            )
        home_experts_per_rank(num_experts, topology.num_ranks * (migrate.domains.domain_size if migrate else 1))
        check_mesh(mesh, topology)
        # The routers of this package name `K`; for a function it is unknown here.
        per_token = getattr(router, "num_experts_per_tok", None)
        system = resolve_system(system, num_experts, per_token, topology).replace(transfer=precision.transfer)
        if why := system.no_op_reason(topology, num_experts):
            warnings.warn(f"the system cannot balance anything: {why}", stacklevel=CALLER)
        self.router, self.mesh, self.topology, self.system = router, mesh, topology, system
        self.expert_config, self.shared_expert = experts, shared
        self.losses, self.precision = losses, precision
        rules = logical_axis_rules(topology, migrate) if rules is None else rules
        self.shards = fsdp_axes(rules, topology, expert_axes(topology, migrate))
        _check_codec(migrate, mesh, topology, self.shards)
        self.length_axes = axis_names(dict(rules).get("length"))
        split = math.prod(mesh.shape[axis] for axis in expert_axes(topology, migrate) + self.shards.exp_axes)
        home_experts_per_rank(num_experts, split)

        options = router_options(router)
        if not options.learns and losses == Losses():
            warnings.warn(f"the kernel has no gradient, as {type(router).__name__} ignores it", stacklevel=CALLER)
        parameters = Parameters(mesh, rules, precision.param_dtype, kernel_init, rngs)
        self._make_experts(parameters, (num_experts, embed_dim, experts.hidden_dim), options.logit_bias)
        self._make_shared(parameters, embed_dim)
        self.known: nnx.List[CodecState] = nnx.List([])
        if migrate is not None and migrate.codec.remembers:
            self.known = nnx.List(self._known_weights(migrate))
        self.residual: nnx.List[GradientResidual] = nnx.List([])
        if migrate is not None and migrate.needs_residual:
            self.residual = nnx.List(self._zero_residual(migrate))
        self._make_states(num_experts, options.selection_bias)

    def _make_states(self, num_experts: int, selection_bias: bool) -> None:
        relocates = self.system.relocates
        everywhere, by_group = PartitionSpec(), PartitionSpec(self.topology.data_axes)

        def on_mesh(tree: PyTree, spec: PartitionSpec) -> PyTree:
            # Put the states on the parameters' devices: a checkpoint of both then restores onto any mesh.
            return jax.device_put(tree, NamedSharding(self.mesh, spec))

        zeros = jnp.zeros((num_experts,), jnp.float32)
        self.bias = RouterBias(on_mesh(zeros, everywhere)) if selection_bias else None
        self.homes = ExpertHomes(on_mesh(jnp.arange(num_experts, dtype=jnp.int32), everywhere)) if relocates else None
        self.loads = RunningLoads(on_mesh(zeros, everywhere)) if relocates else None
        # Each group along the data axes plans for its own tokens, so each has its own state.
        state = self.system.balancer.init((self.topology.num_ranks, num_experts))
        if relocates and jax.tree.leaves(state):
            raise ValueError(
                f"system.relocates is True; expected False with {type(self.system.balancer).__name__}, "
                "which remembers the loads of places between steps"
            )
        num_groups = math.prod(self.mesh.shape[axis] for axis in self.topology.data_axes)
        stacked = jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * num_groups), state)
        self.state = BalancerState(on_mesh(stacked, by_group)) if jax.tree.leaves(state) else None
        self.empty_state = None if jax.tree.leaves(state) else state

    def _make_experts(self, parameters: Parameters, sizes: tuple[int, int, int], logit_bias: bool) -> None:
        num_experts, width, inner = sizes
        gated, use_bias = self.expert_config.gated, self.expert_config.use_bias
        into, out = (num_experts, width, inner), (num_experts, inner, width)
        self.kernel = parameters.kernel((width, num_experts), ("embed", None))
        self.up = parameters.kernel(into, ("exp", "embed", "mlp"))
        self.down = parameters.kernel(out, ("exp", "mlp", "embed"))
        self.gate = parameters.kernel(into, ("exp", "embed", "mlp")) if gated else None
        self.kernel_bias = parameters.bias((num_experts,), (None,)) if logit_bias else None
        self.up_bias = parameters.bias((num_experts, inner), ("exp", "mlp")) if use_bias else None
        self.down_bias = parameters.bias((num_experts, width), ("exp", "embed")) if use_bias else None
        self.gate_bias = parameters.bias((num_experts, inner), ("exp", "mlp")) if use_bias and gated else None

    def _make_shared(self, parameters: Parameters, width: int) -> None:
        if self.shared_expert is None:
            return
        inner, num_logits = self.shared_expert.hidden_dim, self.shared_expert.mix.num_logits
        self.shared_up = parameters.kernel((width, inner), ("embed", "mlp"))
        self.shared_down = parameters.kernel((inner, width), ("mlp", "embed"))
        self.shared_gate = parameters.kernel((width, inner), ("embed", "mlp")) if self.expert_config.gated else None
        self.shared_kernel = parameters.kernel((width, num_logits), ("embed", None)) if num_logits else None

    def __call__(
        self,
        x: Float[Array, "*B H"],
        mask: Bool[Array, "*B"] | None = None,
        *,
        token_ids: Int[Array, "*B"] | None = None,
        key: Key[Array, ""] | None = None,
        segments: Int[Array, "*B"] | None = None,
        num_segments: int | None = None,
        experts: Int[Array, "*B K"] | None = None,
        weights: Float[Array, "*B K"] | None = None,
        return_routing: bool = False,
    ) -> Any:
        """Apply the layer to tokens.

        Args:
            x: `[..., H]` tokens, any number of them. With three or more dimensions, the last but one is the sequence.
                If the `D * R` shards do not divide the number of tokens, as in a decode step, the layer pads them.
                Buffer sizes follow the number of tokens.
            mask: `[...]` booleans, False for padding tokens, which have output 0 and may be NaN; `None` (default)
                without padding.
            token_ids: `[...]` integers, for routers that read them, such as `HashRouter`; `None` by default.
            key: random key for routers that sample, such as `NoisyTopK`; pass a new one in each call. `None` by
                default.
            segments: `[..., S]` integers, for `Losses.sequence`: the document per token in its sequence, from 0 to
                `num_segments - 1`. Others, such as -1, are in none. `None` (default) for one document per sequence.
            num_segments: largest number of documents per sequence; required with `segments`.
            experts: `[..., K]` integers, given experts per token (router replay). In a token's row, -1 is no
                expert, but if all are -1, the router chooses. `None` (default) if the router chooses for all.
            weights: `[..., K]`, weights of the given experts; `None` (default) to compute them from the logits.
            return_routing: if True, also return the experts per token, for `experts`; False by default.

        Returns:
            Outputs `[..., H]` with the sharding of `x`, and statistics stacked over the `D` groups. With
            `return_routing` also the experts `[..., K]` int32 chosen by the router or given, -1 for none.

        Raises:
            ValueError: an array has other leading dimensions than `x`, or an argument requires another one.
            ValueError: there is a fault, and the call is outside of `jax.jit` and other transformations. A transformed
                call returns the fault in the statistics: call `raise_on_fault(stats)` once per step.
        """
        arrays = {"mask": mask, "token_ids": token_ids, "segments": segments, "experts": experts, "weights": weights}
        check_tokens(x, (..., self.kernel.shape[0]), key, arrays)
        # A NumPy array may have a dtype that JAX truncates.
        x = jnp.asarray(x)
        if jax.typeof(x).sharding.mesh.empty:
            # An input without a mesh gives no sharding for the outputs: replicate it over all devices first.
            x = place(x, NamedSharding(self.mesh, PartitionSpec()), self.mesh)
        # Cast weights and tokens before the exchanges: bfloat16 halves the transferred bytes.
        dtype = self.precision.dtype
        x = x if dtype is None else x.astype(dtype)
        layout = self._layout(x)
        given = GivenTokens(mask, token_ids, segments, num_segments, experts, weights)
        info, num_segments = given.enter(layout, needs_segments=self.losses.sequence > 0)
        state = self.empty_state if self.state is None else self.state.get_value()
        stored = self._experts()
        inputs = LayerInputs(
            tokens=layout.enter(x),
            info=info,
            key=key,
            kernel=self.kernel[...],
            experts=jax.tree.map(lambda w: w.astype(x.dtype), stored),
            logit_bias=_value(self.kernel_bias),
            selection_bias=_value(self.bias),
            homes=_value(self.homes),
            state=state,
            known=_as_experts(self.known, stored),
            residual=_as_experts(self.residual, stored),
        )
        config = self._config(x, stored, layout, num_segments, return_routing)
        y, stats, state, known, routing = sharded_moe(inputs, layer=config)
        raise_if_concrete(stats)
        if self.state is not None:
            self.state.set_value(state)
        for one, now in zip(self.known, jax.tree.leaves(known), strict=True):
            one.set_value(now)
        y = layout.leave(y, jax.typeof(x).sharding)
        if self.shared_expert is not None:
            shared, kernel = jax.tree.map(lambda w: w.astype(x.dtype), (self._shared(), _value(self.shared_kernel)))
            y = add_shared(x, y, mask, shared, kernel, mix=self.shared_expert.mix, mesh=self.mesh)
        return (y, stats, *(layout.leave(of_tokens, layout.of_tokens(x)) for of_tokens in routing))

    def _layout(self, x: Array) -> TokenLayout:
        shape, axes = x.shape[:-1], self.topology.data_axes + self.topology.expert_axes
        known = [axis_names(entry) for entry in jax.typeof(x).sharding.spec[: len(shape)]]
        if len(shape) > 1 and not any(known):
            known[-1] = self.length_axes
        return token_layout(shape, self.mesh, axes, known)

    def _config(
        self, x: Array, stored: Experts, layout: TokenLayout, num_segments: int | None, return_routing: bool
    ) -> LayerConfig:
        fuse = self.expert_config.fuse_gate_up
        if fuse is None:
            is_accelerated = self.mesh.devices.flat[0].platform != "cpu"
            fuse = self.expert_config.gated and is_accelerated and stored.up.dtype != x.dtype
        return LayerConfig(
            router=self.router,
            system=self.system,
            topology=self.topology,
            mesh=self.mesh,
            shards=self.shards,
            losses=self.losses,
            tokens=layout,
            num_segments=num_segments,
            return_routing=return_routing,
            fuse_gate_up=fuse,
        )

    def reset_codec(self) -> None:
        """Send the uncompressed experts to all ranks of the expert domain, to reset the codec state.

        A new layer starts in this state. Call it after loading other weights or moving experts. Without it, later calls
        correct the codec state gradually. It also sets the residual of encoded gradients to zero. It has no effect
        without such a codec.
        """
        migrate = self.system.migrate
        if migrate is not None and self.known:
            for weights, now in zip(self.known, self._known_weights(migrate), strict=True):
                weights.set_value(now.get_value())
        for left in self.residual:
            left.set_value(jnp.zeros_like(left.get_value()))

    def update_bias(self, stats: Stats, rate: float = 1e-3) -> None:
        """Update the selection bias of the router from the load of one step; call it after the optimizer step.

        Args:
            stats: statistics returned by this layer in the step.
            rate: step size of the bias; 1e-3 by default. See `updated_bias`.

        Raises:
            ValueError: the router has `selection_bias=False`.
        """
        if self.bias is None:
            raise ValueError("router.selection_bias is False; expected True, for update_bias")
        self.bias[...] = updated_bias(self.bias[...], self._load_by_expert(stats), rate)

    def update_loads(self, stats: Stats, decay: float = 0.9) -> None:
        """Update the running mean of the loads with those of one step; call it after the optimizer step.

        Args:
            stats: statistics returned by this layer in the step.
            decay: weight of the earlier mean, at least 0 and less than 1. 0.9 (default) averages over about ten steps.

        Raises:
            ValueError: the system has `relocates=False`, or `decay` is out of range.
        """
        if self.loads is None:
            raise ValueError("system.relocates is False; expected True, for update_loads")
        if not 0 <= decay < 1:
            raise ValueError(f"decay is {decay}; expected at least 0 and less than 1")
        load = self._load_by_expert(stats).astype(jnp.float32)
        self.loads[...] = decay * self.loads[...] + (1 - decay) * load

    def _load_by_expert(self, stats: Stats) -> Int[Array, "E"]:
        # After a relocation, counts are numbered by place; loads and bias are numbered by expert.
        check_value("stats", stats, Stats)
        load = stats.counts.reshape(-1, stats.counts.shape[-1]).sum(0, dtype=jnp.int32)
        return load if self.homes is None else load[self.homes[...]]

    def _experts(self) -> Experts:
        return Experts(
            self.up[...],
            self.down[...],
            _value(self.gate),
            self.expert_config.activation,
            up_bias=_value(self.up_bias),
            down_bias=_value(self.down_bias),
            gate_bias=_value(self.gate_bias),
            **{name: _value(getattr(self, name, None)) for name in ADAPTERS},
        )

    def _known_weights(self, migrate: GatherExpertDomain) -> list[CodecState]:
        known = sharded_known(self._experts(), migrate=migrate, mesh=self.mesh)
        axes = expert_axes(self.topology, migrate)
        return [
            CodecState(leaf, out_sharding=(axes, *[None] * (leaf.ndim - 1)), mesh=self.mesh)
            for leaf in jax.tree.leaves(known)
        ]

    def _zero_residual(self, migrate: GatherExpertDomain) -> list[GradientResidual]:
        specs = expert_specs(self._experts(), self.topology, migrate)
        zeros = sharded_residual(self._experts(), topology=self.topology, migrate=migrate, mesh=self.mesh)
        return [
            GradientResidual(leaf, out_sharding=tuple(spec), mesh=self.mesh)
            for leaf, spec in zip(jax.tree.leaves(zeros), jax.tree.leaves(specs), strict=True)
        ]

    def _shared(self) -> Experts:
        return Experts(
            self.shared_up[...], self.shared_down[...], _value(self.shared_gate), self.expert_config.activation
        )


def _as_experts(leaves: Sequence[nnx.Variable], like: Experts) -> Experts | None:
    return jax.tree.unflatten(jax.tree.structure(like), [leaf[...] for leaf in leaves]) if leaves else None


def _value(variable: nnx.Variable | None) -> Array | None:
    return None if variable is None else variable[...]


def resolve_system(system: System | str, num_experts: int, per_token: int | None, topology: Topology) -> System:
    """Return the system of a layer."""
    # It has at most as many replica slots as other ranks have experts, and the dispatch of `dispatch_by_rule`.
    made = system_named(system) if isinstance(system, str) else system
    made = made if per_token is None else made.by_rule(topology, num_experts, per_token)
    return made.limit_slots(num_experts, num_experts // topology.num_ranks)


def _check_rules(rules: LogicalAxisRules | None) -> None:
    if rules is None:
        return
    for rule in rules:
        is_pair = isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[0], str)
        if not is_pair or not isinstance(rule[1], str | tuple | list | None):
            raise TypeError(f"rules has {shown(rule)}; expected pairs of a logical axis and its mesh axes")
    if missing := sorted({"exp", "embed", "mlp"} - {name for name, _ in rules}):
        raise ValueError(f"rules is {shown(rules)}; expected a pair for each of {missing}, too")


def _default_topology(mesh: Mesh) -> Topology:
    if "expert" not in mesh.axis_names:
        raise ValueError(
            f"mesh has the axes {mesh.axis_names}; expected the axis 'expert', or "
            f"topology=Topology.from_mesh(mesh, {mesh.axis_names[-1]!r}) with the axis of the experts"
        )
    return Topology.from_mesh(mesh)


def _check_codec(migrate: GatherExpertDomain | None, mesh: Mesh, topology: Topology, shards: FsdpExperts) -> None:
    """Refuse a codec whose states would be of whole experts, if a rank has shards of them."""
    if migrate is None:
        return
    data_axes = shards.exp_axes + shards.embed_axes + shards.mlp_axes
    # The residual follows tensor axes, and the decoded experts follow neither.
    axes = data_axes + (topology.tensor_axes if migrate.codec.remembers else ())
    if (migrate.codec.remembers or migrate.needs_residual) and math.prod(mesh.shape[axis] for axis in axes) > 1:
        raise ValueError(f"system.migrate.codec is {migrate.codec}; expected Codec(), as axes {axes} split each expert")


def check_mesh(mesh: Mesh, topology: Topology) -> None:
    """Check that a mesh has the axes and ranks of a topology."""
    if not topology.expert_axes:
        raise ValueError("topology has no expert_axes; expected one made by Topology.from_mesh(mesh)")
    for axis in topology.expert_axes + topology.data_axes + topology.tensor_axes:
        if axis not in mesh.axis_names:
            raise ValueError(f"topology names axis {axis!r}; expected an axis of the mesh, one of {mesh.axis_names}")
    ranks = math.prod(mesh.shape[axis] for axis in topology.expert_axes)
    if ranks != topology.num_ranks:
        raise ValueError(
            f"topology has {topology.num_ranks} ranks; expected the {ranks} of mesh axes {topology.expert_axes}"
        )
