"""A layer on two parallel groups of ranks, for one process and for several."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_moe_lb import Buffers, Experts, MoEParams, System, TopK, Topology, moe, plain
from jax_moe_lb.balancers import Greedy
from jax_moe_lb.transport import PeerCopy


def layer_step(mesh, place):
    """Return outputs, rounds and gradients of a layer on (expert, data), with more rounds in one data shard."""
    return _step(mesh, place, plain(Buffers(1.6)), Topology.from_mesh(mesh))[0]


def domains_step(mesh, place, replicate=PeerCopy()):
    """Return the same for a layer on four ranks, in two domains of two, with weight copies; and the program's text."""
    topology = Topology.from_mesh(mesh, ranks_per_domain=2)
    return _step(mesh, place, System(Greedy(), replicate, replica_slots=1), topology)


def _step(mesh, place, system, topology):
    rng = np.random.default_rng(5)
    kernel = np.concatenate([np.eye(4), np.zeros((4, 4))]).astype(np.float32)
    up, down = (jnp.asarray(rng.normal(size=shape), "float32") for shape in [(4, 8, 6), (4, 6, 8)])
    x = rng.normal(size=(2, 2, 8, 8)).astype(np.float32)
    x[0, :, :, :2] += 9  # all tokens of the first data shard prefer the experts of the first rank
    by_token, by_expert = PartitionSpec(mesh.axis_names[::-1]), PartitionSpec("expert")

    def one_rank(x, kernel, experts):
        y, stats, _ = moe(x, MoEParams(kernel, experts), TopK(2), system, topology)
        return y, stats.rounds[None]

    specs = (by_token, PartitionSpec(), by_expert)
    by_group = PartitionSpec(topology.data_axes or None)
    run = jax.shard_map(one_rank, mesh=mesh, in_specs=specs, out_specs=(by_token, by_group))

    def loss(*args):
        y, rounds = run(*args)
        return jnp.square(y).sum(), (y, rounds)

    args = x.reshape(-1, 8), kernel, Experts(up, down)
    placed = [
        jax.tree.map(lambda leaf, spec=spec: place(spec, leaf), arg) for arg, spec in zip(args, specs, strict=True)
    ]
    step = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
    lowered = step.lower(*placed)
    gradients, out = lowered.compile()(*placed)
    return (out, gradients), lowered.as_text()
