"""Where XLA puts the gathers of `scan_prefetched`: compiles for 8 TPU v5e that need not be there.

`python -m benchmarks.prefetch_schedule`, with the package `libtpu` installed. Prints, in the order of the schedule, the
collectives of the loop over layers and, between them, how many operations of the program run in each part of a block.
"""

import itertools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_moe_lb import Buffers, Experts, MoEParams, TopK, Topology, moe, plain
from jax_moe_lb.core import validation as legality
from jax_moe_lb.layer import moe as pipeline
from jax_moe_lb.transport import ExpertDomains, GatherExpertDomain, hybrid_mesh, scan_prefetched

LAYERS, WIDTH, INNER, NUM_EXPERTS, TOKENS = 4, 1024, 2048, 16, 1024
# By default collectives of a TPU are not asynchronous.
OPTIONS = {
    "xla_enable_async_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
}


def compiled() -> str:
    """The scheduled program: layers of three products, which stand for attention, and experts."""
    devices = np.asarray(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices)
    whole = Mesh(devices, ("gpu",), axis_types=(AxisType.Auto,))
    mesh = hybrid_mesh(whole, {"gpu": 4})
    domains = ExpertDomains.from_mesh(mesh, Topology.from_mesh(whole, "gpu"))
    by_rank, stacked = PartitionSpec(domains.expert_axes), PartitionSpec(None, domains.expert_axes)

    def block(x, parameters, held):
        kernel, attention = parameters
        for _ in range(3):
            x = jnp.tanh(x @ attention)
        y, stats, _ = moe(x, MoEParams(kernel, held), TopK(2), plain(Buffers(2.0)), domains.between)
        return x + y, stats.rounds

    def layers(x, kernels, attention, experts):
        return scan_prefetched(block, x, (kernels, attention), experts, GatherExpertDomain(domains))[0]

    def array(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    everywhere = PartitionSpec()
    up = array(stacked, LAYERS, NUM_EXPERTS, WIDTH, INNER)
    down = array(stacked, LAYERS, NUM_EXPERTS, INNER, WIDTH)
    args = (
        array(by_rank, 8 * TOKENS, WIDTH),
        array(everywhere, LAYERS, WIDTH, NUM_EXPERTS),
        array(everywhere, LAYERS, WIDTH, WIDTH),
        Experts(up, down),
    )
    specs = (by_rank, everywhere, everywhere, stacked)
    program = jax.jit(jax.shard_map(layers, mesh=mesh, in_specs=specs, out_specs=by_rank))
    return program.trace(*args).lower(lowering_platforms=("tpu",)).compile(OPTIONS).as_text()


def schedule(hlo: str) -> list[str]:
    """Names of the loop body's operations in order; other operations by where they come from."""
    body = max(hlo.split("\n\n"), key=lambda text: text.count("async-collective-"))
    steps = []
    for line in body.splitlines()[1:]:
        name = line.split("=")[0].replace("ROOT", "").strip(" %")
        source = re.search(r'op_name="[^"]*body/eval_jaxpr/([^"]*)"', line)
        if re.match(r"(async-collective|while|all_to_all|all-to-all)", name):
            steps.append(name)
        elif source and " fusion(" in line:
            steps.append(f"  {source[1].split('/')[0]}")
    return steps


def main() -> None:
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # Devices that are not there cannot call the host, which a broken rule would.
    legality.ensure = pipeline.ensure = lambda ok, check, *args: jnp.zeros_like(ok, jnp.int32)
    for step, times in itertools.groupby(schedule(compiled())):
        number = len(list(times))
        print(step if number == 1 else f"{step} x {number}")


if __name__ == "__main__":
    main()
