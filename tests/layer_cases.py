"""One MoE layer on a mesh, and its dense reference."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from benchmarks.layer.workloads import WORKLOADS, Workload
from jax_moe_lb import ExpertConfig, Experts, Losses, MoE, MoEParams, MoEState, System, TokenInfo, TopK, Topology, moe
from jax_moe_lb.core.stats import raise_if_concrete
from jax_moe_lb.transport import Codec, ExpertDomains, GatherExpertDomain, hybrid_mesh
from tests.oracle import dense_moe

BY_NAME = {workload.name: workload for workload in WORKLOADS}


@dataclass(frozen=True)
class Case:
    """Sizes of a layer. The first columns of its tokens are random, and the last `E` contain expert preferences."""

    num_tokens: int = 24
    features: int = 4
    mlp_dim: int = 8
    num_experts: int = 16
    per_tok: int = 2
    gated: bool = True

    @property
    def width(self) -> int:
        return self.features + self.num_experts

    def params(self, dtype) -> tuple[jax.Array, Experts]:
        rng = np.random.default_rng(1)
        kernel = np.concatenate([0.01 * rng.normal(size=(self.features, self.num_experts)), np.eye(self.num_experts)])
        up, gate = 0.3 * rng.normal(size=(2, self.num_experts, self.width, self.mlp_dim))
        down = 0.3 * rng.normal(size=(self.num_experts, self.mlp_dim, self.width))
        experts = Experts(jnp.asarray(up, dtype), jnp.asarray(down, dtype), jnp.asarray(gate, dtype))
        return jnp.asarray(kernel, dtype), experts if self.gated else Experts(experts.up, experts.down)

    def tokens(self, workload: Workload | str, num_shards: int, dtype) -> tuple[jax.Array, jax.Array]:
        """Return tokens of all shards, and their mask."""
        workload = BY_NAME.get(workload, workload)
        logits = workload.logits(0, num_shards, self.num_tokens, self.num_experts)
        features = np.random.default_rng(2).normal(size=(*logits.shape[:2], self.features))
        # Preferences are integers, so that rounding to bfloat16 does not change the selected experts.
        ranks = np.argsort(np.argsort(logits, axis=-1), axis=-1)
        x = np.concatenate([features, ranks - self.num_experts / 2], -1) / 4
        mask = workload.mask(num_shards, self.num_tokens).reshape(-1)
        return jnp.asarray(x.reshape(-1, self.width), dtype), jnp.asarray(mask)

    def arguments(self, workload: Workload | str, num_shards: int, dtype="float32", target="float32") -> tuple:
        """Return the arguments of a layer with its gradients; `target` is the dtype of the gradients of outputs."""
        x, mask = self.tokens(workload, num_shards, dtype)
        return x, mask, *self.params(dtype), jnp.asarray(np.random.default_rng(3).normal(size=x.shape), target)


def make_mesh(sizes, names, axis_type=AxisType.Auto):
    return jax.make_mesh(sizes, names, axis_types=(axis_type,) * len(sizes), devices=jax.devices()[: np.prod(sizes)])


def expert_domains(base, sizes, axes="expert", **options):
    """Return a mesh with expert domains of these sizes by axis, and the domains, in a topology with these options."""
    mesh = hybrid_mesh(base, sizes)
    return mesh, ExpertDomains.from_mesh(mesh, Topology.from_mesh(base, axes, **options))


def over_domains(mesh, domains, function, *args, out=None):
    """Return the results of a function on the ranks of expert domains."""
    spec = PartitionSpec(domains.expert_axes)
    run = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec if out is None else out)
    return jax.jit(run)(*args)


def hybrid_moe(mesh, domains, system, codec=Codec()):
    """Return `sharded_moe` with experts gathered first."""
    return sharded_moe(mesh, domains.between, system.replace(migrate=GatherExpertDomain(domains, codec)))


def make_layer(mesh, system, sizes=(8, 8, 4), router=TopK(2), **options):
    """Return an `MoE` of a width, a number of experts and an inner width."""
    width, num_experts, inner = sizes
    given = {"mesh": mesh, "system": system, "experts": ExpertConfig(inner), "rngs": nnx.Rngs(0)}
    return MoE(width, num_experts, router, **given | options)


def loses_a_token(counts, plan, topology):
    """Return an illegal plan, as a planner of `HostCallback`."""
    quota = plan.quota.copy()
    quota[np.unravel_index(quota.argmax(), quota.shape)] -= 1
    return replace(plan, quota=quota)


def sequences(num_tokens, length, topology):
    """Return the arguments of `TokenInfo` for sequences of consecutive tokens; call it inside `shard_map`."""
    axes = topology.data_axes + topology.expert_axes
    first = jax.lax.axis_index(axes) * num_tokens
    return {
        "segments": (first + jnp.arange(num_tokens, dtype=jnp.int32)) // length,
        "num_segments": jax.lax.axis_size(axes) * num_tokens // length,
    }


def sharded_moe(mesh, topology: Topology, system: System, router=None, check_vma=True, losses=None):
    """Return `(x, mask, kernel, experts) -> (y, stats)` over the mesh, with stats stacked over groups."""
    ranks = topology.expert_axes if system.migrate is None else system.migrate.domains.expert_axes
    tokens = PartitionSpec((*(axis for axis in topology.data_axes if axis not in ranks), *ranks))
    groups = PartitionSpec(topology.data_axes or None)
    router = TopK(2) if router is None else router

    def one_rank(x, mask, kernel, experts):
        info = {} if losses is None else sequences(x.shape[0], x.shape[0] // 2, topology)
        state = system.balancer.init((topology.num_ranks, kernel.shape[1]))
        params, start, info = MoEParams(kernel, experts), MoEState(state), TokenInfo(mask=mask, **info)
        y, stats, _ = moe(x, params, router, system, topology, start, info, losses or Losses())
        return y, stats.of_group

    specs = {"in_specs": (tokens, tokens, PartitionSpec(), PartitionSpec(ranks)), "out_specs": (tokens, groups)}
    return jax.shard_map(one_rank, mesh=mesh, **specs, check_vma=check_vma)


class Checked:
    """Jitted function `(...) -> ((y, stats), ...)` whose calls raise on a fault."""

    def __init__(self, run):
        self.run = run

    def __call__(self, *args):
        out = self.run(*args)
        if (stats := out[0][1]) is not None:
            raise_if_concrete(stats)
        return out

    def __getattr__(self, name):
        return getattr(self.run, name)


def with_gradients(layer, checked=True):
    """Return the jitted `(x, mask, kernel, experts, target) -> ((y, stats), gradients of x, kernel and experts)`.

    It raises on a fault if `checked`: with the plain plan in place of an illegal one, outputs alone would hide it.
    """

    def loss(x, kernel, experts, mask, target):
        y, stats = layer(x, mask, kernel, experts)
        return (y.astype(target.dtype) * target).sum(), (y, stats)

    @jax.jit
    def run(x, mask, kernel, experts, target):
        gradients, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, kernel, experts, mask, target)
        return out, gradients

    return Checked(run) if checked else run


@functools.cache
def dense_with_gradients(router):
    """Return the same for the dense reference, compiled once per process."""
    return with_gradients(lambda x, mask, kernel, experts: (dense_moe(x, kernel, experts, router, mask), None))


def assert_equals_dense(layer, args, relative, router=TopK(2)):
    """Compare outputs and gradients of a layer with the dense reference; return the statistics of the layer."""
    (y, stats), gradients = layer(*args)
    (want, _), want_gradients = dense_with_gradients(router)(*args)
    assert_close((y, gradients), (want, want_gradients), relative)
    return stats


def assert_close(actual, expected, relative):
    """Compare leaf by leaf, relative to the largest entry of the expected leaf."""
    for (path, got), want in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        error, scale = np.abs(got - want).max(initial=0), max(np.abs(want).max(initial=0), 1e-6)
        assert error <= relative * scale, f"{jax.tree_util.keystr(path)}: error {error:.3g} of {scale:.3g}"
