"""The Flax layer holds parameters and the balancer's state, and calls `pipeline.moe`."""

import inspect
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

from jax_moe_lb.core.stats import Checks, Stats
from jax_moe_lb.core.topology import Topology, home_experts_per_rank
from jax_moe_lb.core.types import DType
from jax_moe_lb.kernels.experts import Activation, Experts
from jax_moe_lb.layer.moe import TOKEN_DTYPES
from jax_moe_lb.layer.systems import System, system_named, system_names
from jax_moe_lb.nn.sharding import (
    LayerConfig,
    LayerInputs,
    LogicalAxisRules,
    Parameters,
    SharedMix,
    expert_axes,
    place,
    reshaped,
    sharded_known,
    sharded_moe,
)
from jax_moe_lb.routing.losses import Losses
from jax_moe_lb.routing.routers import Router, updated_bias
from jax_moe_lb.transport.expert_domains import GatherExpertDomain
from jax_moe_lb.transport.fsdp import FsdpExperts


class BalancerState(nnx.Variable):
    """This variable holds what the balancer remembers between steps. It is no parameter: no optimizer touches it."""


class RouterBias(nnx.Variable):
    """This variable holds the routing bias of each expert, `[E]`. `MoE.update_bias` moves it, never gradients."""


class ExpertHomes(nnx.Variable):
    """This variable holds the place of each expert, int32 `[E]`. `relocate` moves it, never gradients."""


class RunningLoads(nnx.Variable):
    """This variable holds the running mean of each expert's load, float32 `[E]`. `MoE.update_loads` moves it."""


class CodecState(nnx.Variable):
    """This variable holds what ranks have decoded of their expert domains, `[E * domain_size, ...]`.

    Every call of the layer moves it, never gradients.
    """


def logical_axis_rules(topology: Topology, migrate: GatherExpertDomain | None = None) -> LogicalAxisRules:
    """Makes the default table of logical axes: experts over the expert axes, their inner width over tensor axes.

    Replace `embed` by data axes, such as `("embed", "fsdp")`, and give the table to `MoE` as `rules`, so that
    parameters, gradients and optimizer state are split over these, too (FSDP): the layer gathers what it needs.

    Args:
        topology: the layer's topology.
        migrate: the layer's `GatherExpertDomain`, if it has one.

    Examples:
        >>> from jax.sharding import AbstractMesh
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.nn import logical_axis_rules
        >>> logical_axis_rules(Topology.from_mesh(AbstractMesh((2, 8), ("data", "expert"))))
        (('exp', ('expert',)), ('embed', None), ('mlp', None))
    """
    return (("exp", expert_axes(topology, migrate)), ("embed", None), ("mlp", topology.tensor_axes or None))


class MoE(nnx.Module):
    """This mixture-of-experts layer stays balanced and drops nothing.

    Put it where a transformer has its feed-forward network. It takes the tokens of all ranks, outside `jax.shard_map`,
    and keeps parameters, routing bias and the balancer's state; the expert weights are sharded over the expert axes.

    Args:
        embed_dim: `H`, the width of the model.
        mlp_dim: `F`, the inner width of an expert.
        num_experts: `E`, a multiple of the number of ranks.
        router: chooses the experts of a token: `TopK`, `ForceBalanced` or a callable like them.
        mesh: the mesh of the expert and data axes, which may be Auto or Explicit. The layer may be called inside a
            `jax.shard_map` over further axes, such as the stages of a pipeline, which needs `check_vma=False` for
            gradients with JAX 0.12.
        topology: what `Topology.from_mesh(mesh, ...)` reads; with `migrate` its `domains.between`. `None`, the default,
            takes these, without further options.
        system: the strategies, such as `jax_moe_lb.exact()`, or the name of a function of `systems.py`, such as
            "exact"; plain expert parallelism by default.
        migrate: gathers the experts of expert domains first, over a mesh of `hybrid_mesh`. With `None`, the usual
            choice inside one datacenter, experts stay at home.
        gated: whether experts have a gate, which is usual.
        expert_bias: whether something learned is added to each product of an expert: GPT-OSS. It is not usual.
        kernel_bias: whether something learned is added to the router's logits: GPT-OSS.
        activation: the function between the projections (`jax_moe_lb.kernels`); `None`, the default, is SwiGLU with a
            gate and GELU without one.
        fused: whether rows are multiplied with `up` and `gate` at once, which are two parameters all the same.
            `None`, the usual choice: on accelerators, where `dtype` is not `param_dtype`. That saves memory traffic,
            since the cast writes both side by side; without one they would have to be copied. `True` needs `gated`.
        shared_mlp_dim: the inner width of the shared expert, which every token passes; 0 for none.
        shared_mix: how its output is added, see `SharedMix`.
        use_bias: whether to keep a `RouterBias` (balancing without an auxiliary loss); then call `update_bias`.
        relocatable: whether to keep `ExpertHomes` and `RunningLoads`, so that experts can move between ranks; then call
            `update_loads`, and `relocate` every so many steps. `None`, the default: if the system relocates, as that of
            `two_tier` does.
        losses: coefficients of the router losses; add `router_loss` of the statistics to the loss of the model.
        capacity_factor: drops what experts cannot take, to compare with layers that do, see `moe`; `None`, the default,
            drops nothing.
        dtype: the dtype of the experts' arithmetic and of replicated weights, usually bfloat16 on accelerators; `None`
            takes that of the input.
        param_dtype: the dtype of the parameters, usually float32.
        kernel_init: the initializer of all kernels.
        rules: the table from logical to mesh axes; `None` takes `logical_axis_rules(topology, migrate)`.
        checks: what to do about bad values, see `moe`; `None`, the usual choice, stops the program on CPUs and defers
            on accelerators: call `raise_on_fault` on the statistics of each step there.
        rngs: random numbers for the parameters.

    Warns:
        UserWarning: the system cannot balance anything on this mesh, such as `hybridep()` with too few slots.

    Raises:
        ValueError: `num_experts` is no multiple of the ranks, the topology is not the mesh's, or a `relocatable` layer
            has a balancer that remembers where experts are.
        TypeError: `system` is neither a system nor the name of one.

    Examples:
        Two ranks, of which each has half of the tokens and half of the experts:

        >>> import jax
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jax.sharding import AxisType
        >>> from jax_moe_lb import TopK, Topology
        >>> from jax_moe_lb import MoE
        >>> mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> layer = MoE(8, 16, 4, TopK(2), mesh=mesh, topology=Topology.from_mesh(mesh), rngs=nnx.Rngs(0))
        >>> y, stats = layer(jnp.ones((6, 8)))
        >>> y.shape, int(stats.counts.sum())
        ((6, 8), 12)
    """

    def __init__(
        self,
        embed_dim: int,
        mlp_dim: int,
        num_experts: int,
        router: Router,
        *,
        mesh: Mesh,
        topology: Topology | None = None,
        system: System | str = System(),
        migrate: GatherExpertDomain | None = None,
        gated: bool = True,
        expert_bias: bool = False,
        kernel_bias: bool = False,
        activation: Activation | None = None,
        fused: bool | None = None,
        shared_mlp_dim: int = 0,
        shared_mix: SharedMix = SharedMix.SUM,
        use_bias: bool = False,
        relocatable: bool | None = None,
        losses: Losses = Losses(),
        capacity_factor: float | None = None,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        kernel_init: nnx.Initializer = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", batch_axis=(0,)),
        rules: LogicalAxisRules | None = None,
        checks: Checks | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        if dtype is not None and jnp.dtype(dtype) not in map(jnp.dtype, TOKEN_DTYPES):
            raise ValueError(
                f"dtype is {jnp.dtype(dtype)}; expected bfloat16, float32 or float64. For rows that travel in 8 bits "
                "use QuantizedTransfer"
            )
        if fused and not gated:
            raise ValueError("fused is True; expected False without a gate")
        if topology is None:
            topology = migrate.domains.between if migrate else Topology.from_mesh(mesh)
        system = _system(system)
        relocatable = system.relocates if relocatable is None else relocatable
        _check_domains(topology, migrate)
        home_experts_per_rank(num_experts, topology.num_ranks * (migrate.domains.domain_size if migrate else 1))
        _check_mesh(mesh, topology)
        if why := system.no_op_reason(topology, num_experts):
            warnings.warn(f"the system cannot balance anything: {why}", stacklevel=2)
        self.migrate = migrate
        self.router, self.mesh, self.topology, self.system = router, mesh, topology, system
        self.losses, self.capacity_factor, self.dtype = losses, capacity_factor, dtype
        self.checks = checks_of(mesh) if checks is None else checks
        self.gated, self.activation, self.fused = gated, activation, fused
        rules = logical_axis_rules(topology, migrate) if rules is None else rules
        self.shards = _shards(rules, topology)

        parameters = Parameters(mesh, rules, param_dtype, kernel_init, rngs)
        self._make_experts(parameters, (num_experts, embed_dim, mlp_dim), expert_bias, kernel_bias)
        self._make_shared(parameters, (embed_dim, shared_mlp_dim), shared_mix)
        self.known: nnx.List[CodecState] = nnx.List([])
        if migrate is not None and migrate.codec.remembers:
            self.known = nnx.List(self._known_weights(migrate))
        self._make_states(num_experts, use_bias, relocatable)

    def _make_states(self, num_experts: int, use_bias: bool, relocatable: bool) -> None:
        everywhere, by_group = PartitionSpec(), PartitionSpec(self.topology.data_axes)

        def on_mesh(tree: Any, spec: PartitionSpec) -> Any:
            # Where parameters are, so that a checkpoint of both can be restored onto any mesh.
            return jax.device_put(tree, NamedSharding(self.mesh, spec))

        zeros = jnp.zeros((num_experts,), jnp.float32)
        self.bias = RouterBias(on_mesh(zeros, everywhere)) if use_bias else None
        self.homes = ExpertHomes(on_mesh(jnp.arange(num_experts, dtype=jnp.int32), everywhere)) if relocatable else None
        self.loads = RunningLoads(on_mesh(zeros, everywhere)) if relocatable else None
        # Every group on the data axes has a state of its own, as each plans for its own tokens.
        state = self.system.balancer.init((self.topology.num_ranks, num_experts))
        if relocatable and jax.tree.leaves(state):
            raise ValueError(
                f"relocatable is True; expected False with {type(self.system.balancer).__name__}, "
                "which remembers the loads of places between steps"
            )
        stacked = jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * self._num_groups()), state)
        self.state = BalancerState(on_mesh(stacked, by_group)) if jax.tree.leaves(state) else None
        self.empty_state = None if jax.tree.leaves(state) else state

    def _make_experts(
        self, parameters: Parameters, sizes: tuple[int, int, int], expert_bias: bool, kernel_bias: bool
    ) -> None:
        num_experts, width, inner = sizes
        into, out = (num_experts, width, inner), (num_experts, inner, width)
        self.kernel = parameters.kernel((width, num_experts), ("embed", None))
        self.up = parameters.kernel(into, ("exp", "embed", "mlp"))
        self.down = parameters.kernel(out, ("exp", "mlp", "embed"))
        self.gate = parameters.kernel(into, ("exp", "embed", "mlp")) if self.gated else None
        self.kernel_bias = parameters.bias((num_experts,), (None,)) if kernel_bias else None
        self.up_bias = parameters.bias((num_experts, inner), ("exp", "mlp")) if expert_bias else None
        self.down_bias = parameters.bias((num_experts, width), ("exp", "embed")) if expert_bias else None
        has_gate_bias = expert_bias and self.gated
        self.gate_bias = parameters.bias((num_experts, inner), ("exp", "mlp")) if has_gate_bias else None

    def _make_shared(self, parameters: Parameters, sizes: tuple[int, int], mix: SharedMix) -> None:
        width, inner = sizes
        self.has_shared, self.shared_mix = inner > 0, mix
        if self.has_shared:
            self.shared_up = parameters.kernel((width, inner), ("embed", "mlp"))
            self.shared_down = parameters.kernel((inner, width), ("mlp", "embed"))
            self.shared_gate = parameters.kernel((width, inner), ("embed", "mlp")) if self.gated else None
        mixes = self.has_shared and mix.num_logits > 0
        self.shared_kernel = parameters.kernel((width, mix.num_logits), ("embed", None)) if mixes else None

    def __call__(
        self,
        x: Float[Array, "*B H"],
        mask: Bool[Array, "*B"] | None = None,
        *,
        token_ids: Int[Array, "*B"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "*B H"], Stats]:
        """Sends tokens through their experts.

        Args:
            x: `[..., H]`, of any number of tokens; with three dimensions or more the last but one is the sequence.
                Tokens that the `D * R` shards do not divide, such as those of a decode step, are padded inside. Buffers
                are as large as the tokens need.
            mask: `[...]`, false for padding tokens; `None` if there are none.
            token_ids: `[...]` integers, for routers that look at them, such as `HashRouter`.
            key: random numbers for routers that want some, such as `NoisyTopK`; other ones in each call.

        Returns:
            The outputs, placed like `x`, and statistics stacked over the `D` groups.
        """
        num_tokens = math.prod(x.shape[:-1])
        if jax.typeof(x).sharding.mesh.empty:
            # An array on no mesh has no place there that the outputs could take: it is put on all devices first.
            x = place(x, NamedSharding(self.mesh, PartitionSpec()), self.mesh)
        # Weights and tokens are cast before they travel, so that bfloat16 halves what travels.
        x = x if self.dtype is None else x.astype(self.dtype)
        # Without padding nothing is masked: a mask of ones would cost the program passes over the tokens.
        missing = -num_tokens % (self._num_groups() * self.topology.num_ranks)
        mask = jnp.ones(x.shape[:-1], bool) if missing and mask is None else mask
        ids = None if token_ids is None else token_ids.astype(jnp.int32)
        by_token = PartitionSpec(self.topology.data_axes + self.topology.expert_axes)
        tokens, mask, ids = (_flat(array, x.ndim - 1, missing, self.mesh, by_token) for array in (x, mask, ids))
        state = self.empty_state if self.state is None else self.state.get_value()
        stored = self._experts()
        experts = jax.tree.map(lambda w: w.astype(x.dtype), stored)
        fused = self.gated and _is_accelerated(self.mesh) and stored.up.dtype != x.dtype
        inputs = LayerInputs(
            tokens=tokens,
            mask=mask,
            token_ids=ids,
            key=key,
            kernel=self.kernel[...],
            kernel_bias=_value(self.kernel_bias),
            experts=experts,
            bias=_value(self.bias),
            homes=_value(self.homes),
            state=state,
            known=jax.tree.unflatten(jax.tree.structure(stored), [w[...] for w in self.known]) if self.known else None,
        )
        layer = LayerConfig(
            router=self.router,
            system=self.system,
            migrate=self.migrate,
            topology=self.topology,
            mesh=self.mesh,
            shards=self.shards,
            losses=self.losses,
            sequence_length=x.shape[-2] if x.ndim > 2 else None,
            capacity_factor=self.capacity_factor,
            checks=self.checks,
            fused=fused if self.fused is None else self.fused,
        )
        y, stats, state, known = sharded_moe(inputs, layer=layer)
        if self.state is not None:
            self.state.set_value(state)
        for weights, now in zip(self.known, jax.tree.leaves(known), strict=True):
            weights.set_value(now)
        # The caller finds the outputs where the input was.
        if missing:
            y = place(y, NamedSharding(self.mesh, PartitionSpec()), self.mesh)[:num_tokens]
        y = reshaped(y, x.shape, jax.typeof(x).sharding, self.mesh)
        if self.has_shared:
            shared, kernel = jax.tree.map(lambda w: w.astype(x.dtype), (self._shared(), _value(self.shared_kernel)))
            y = self.shared_mix(x, y, shared, kernel)
        return y, stats

    def tell_domains(self) -> None:
        """Sends all experts of an expert domain to all its ranks, whole, where a codec remembers them.

        A layer begins with that. Call it after loading other weights, or moving experts; without, the codec makes up
        for it little by little.
        """
        if self.migrate is not None and self.known:
            for weights, now in zip(self.known, self._known_weights(self.migrate), strict=True):
                weights.set_value(now.get_value())

    def update_bias(self, stats: Stats, rate: float = 1e-3) -> None:
        """Moves the router's bias against the load of one step (see `updated_bias`); call it after the optimizer.

        Args:
            stats: the statistics that the step's call of this layer returned.
            rate: the step of the bias, usually 1e-3.

        Raises:
            ValueError: the layer was made without `use_bias`.
        """
        if self.bias is None:
            raise ValueError("use_bias is False; expected True, for update_bias")
        self.bias[...] = updated_bias(self.bias[...], self._load_by_expert(stats), rate)

    def update_loads(self, stats: Stats, decay: float = 0.9) -> None:
        """Lets the running loads forget by `decay` and adds those of one step; call it after the optimizer.

        Args:
            stats: the statistics that the step's call of this layer returned.
            decay: what is kept of the earlier loads; 0.9, the usual one, is a mean over about ten steps.

        Raises:
            ValueError: the layer was made without `relocatable`, or `decay` is out of range.
        """
        if self.loads is None:
            raise ValueError("relocatable is False; expected True, for update_loads")
        if not 0 <= decay < 1:
            raise ValueError(f"decay is {decay}; expected at least 0 and less than 1")
        load = self._load_by_expert(stats).astype(jnp.float32)
        self.loads[...] = decay * self.loads[...] + (1 - decay) * load

    def _load_by_expert(self, stats: Stats) -> Int[Array, "E"]:
        # Counts are numbered by place once experts have moved, loads and bias by expert.
        load = stats.counts.reshape(-1, stats.counts.shape[-1]).sum(0, dtype=jnp.int32)
        return load if self.homes is None else load[self.homes[...]]

    def _experts(self) -> Experts:
        return Experts(
            self.up[...],
            self.down[...],
            _value(self.gate),
            self.activation,
            up_bias=_value(self.up_bias),
            down_bias=_value(self.down_bias),
            gate_bias=_value(self.gate_bias),
        )

    def _known_weights(self, migrate: GatherExpertDomain) -> list[CodecState]:
        known = sharded_known(self._experts(), migrate=migrate, mesh=self.mesh)
        axes = expert_axes(self.topology, migrate)
        return [
            CodecState(leaf, out_sharding=(axes, *[None] * (leaf.ndim - 1)), mesh=self.mesh)
            for leaf in jax.tree.leaves(known)
        ]

    def _shared(self) -> Experts:
        return Experts(self.shared_up[...], self.shared_down[...], _value(self.shared_gate), self.activation)

    def _num_groups(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.topology.data_axes)


def as_linen(*args: Any, **kwargs: Any) -> nnx.bridge.ToLinen:
    """Makes `MoE` as a Linen module, from the same arguments but `rngs`.

    Use it in a Linen model. State and bias are in collections of their own, `BalancerState` and `RouterBias`; make them
    mutable where the layer has them.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from jax.sharding import AxisType
        >>> from jax_moe_lb import TopK, Topology
        >>> from jax_moe_lb import as_linen
        >>> mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> layer = as_linen(8, 16, 4, TopK(2), mesh=mesh, topology=Topology.from_mesh(mesh))
        >>> (y, stats), variables = layer.init_with_output(jax.random.key(0), jnp.ones((6, 8)))
        >>> y.shape, sorted(variables["params"])
        ((6, 8), ['down', 'gate', 'kernel', 'up'])
    """
    return nnx.bridge.to_linen(MoE, *args, **kwargs)


def _linen_signature() -> inspect.Signature:
    of_moe = inspect.signature(MoE.__init__)
    kept = [parameter for name, parameter in of_moe.parameters.items() if name not in {"self", "rngs"}]
    return of_moe.replace(parameters=kept, return_annotation=nnx.bridge.ToLinen)


# What `help` and editors show in place of `*args`.
as_linen.__signature__ = _linen_signature()  # type: ignore[attr-defined]


def checks_of(mesh: Mesh) -> Checks:
    """Chooses what a layer does about bad values where nobody says: on CPUs it stops, elsewhere the host is told.

    Args:
        mesh: the devices of the layer.
    """
    return "deferred" if _is_accelerated(mesh) else "callback"


def _value(variable: nnx.Variable | None) -> Array | None:
    return None if variable is None else variable[...]


def _shards(rules: LogicalAxisRules, topology: Topology) -> FsdpExperts:
    """Which data axes split the experts' matrices, by the table from logical to mesh axes."""
    table = dict(rules)
    embed, mlp = (_names(table.get(name)) for name in ("embed", "mlp"))
    if mlp[len(mlp) - len(topology.tensor_axes) :] != topology.tensor_axes:
        raise ValueError(f"rules split mlp over {mlp}; expected the topology's tensor_axes {topology.tensor_axes} last")
    mlp = mlp[: len(mlp) - len(topology.tensor_axes)]
    if others := [axis for axis in embed + mlp if axis not in topology.data_axes]:
        raise ValueError(f"rules split experts over {others}; expected data axes, of {topology.data_axes}")
    return FsdpExperts(embed, mlp)


def _names(axes: tuple[str, ...] | str | None) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else axes


def _is_accelerated(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform != "cpu"


def _system(system: System | str) -> System:
    if isinstance(system, System):
        return system
    if system in system_names():
        return system_named(system)
    raise TypeError(f"system is {system!r}; expected a System, or one of {', '.join(system_names())}")


def _flat(array: Array | None, num_dims: int, missing: int, mesh: Mesh, by_token: PartitionSpec) -> Array | None:
    """Makes one dimension of the first ones, the tokens, and puts zeros for `missing` ones after them."""
    if array is None:
        return None
    shape = (math.prod(array.shape[:num_dims]), *array.shape[num_dims:])
    if not missing:
        return reshaped(array, shape, NamedSharding(mesh, by_token), mesh)
    # On an Explicit mesh no axis may divide what it does not divide evenly: these are few, and every device has them.
    array = reshaped(array, shape, NamedSharding(mesh, PartitionSpec()), mesh)
    return jnp.pad(array, ((0, missing), *[(0, 0)] * (array.ndim - 1)))


def _check_domains(topology: Topology, migrate: GatherExpertDomain | None) -> None:
    if migrate is not None and migrate.domains.between != topology:
        raise ValueError("topology is not migrate.domains.between; expected that, between whose ranks tokens travel")


def _check_mesh(mesh: Mesh, topology: Topology) -> None:
    for axis in topology.expert_axes + topology.data_axes:
        if axis not in mesh.axis_names:
            raise ValueError(f"topology names axis {axis!r}; expected an axis of the mesh, one of {mesh.axis_names}")
    ranks = math.prod(mesh.shape[axis] for axis in topology.expert_axes)
    if not topology.expert_axes or ranks != topology.num_ranks:
        raise ValueError(
            f"topology has {topology.num_ranks} ranks; expected the {ranks} of mesh axes {topology.expert_axes}"
        )
