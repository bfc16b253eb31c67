"""`program`, a complete Python program for a choice: mesh, topology, layer, input and a call."""

import re

import jax.numpy as jnp

from jax_moe_lb.advise.choice import RELOCATE_INTERVAL, Choice, system_parts
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.model import DTYPES, ModelShape

WRITTEN = "# Written by `jax-moe-lb advise`"
"""Start of a program."""

SMALL = 64
"""Tokens of a rank, model width and inner width of a program without accelerators."""

EXPORTS = (
    "Buffers",
    "Chain",
    "ExpertConfig",
    "MoE",
    "SharedExpert",
    "TopK",
    "Topology",
    "balancers",
    "raise_on_fault",
    "systems",
    "transport",
    "use_virtual_cpu_devices",
)
"""Exports of `jax_moe_lb` that a program may use."""

MOST_COLUMNS = 100
"""Columns of an import or a call in one line."""


def program(
    choice: Choice, model: ModelShape, cluster: Cluster, gather_again: bool = False, dispatch: str = "Direct"
) -> str:
    """Format a program that makes a layer of the model with a choice, calls it and prints its statistics."""
    # It runs as it is on the accelerators of the cluster. On CPUs it runs on virtual devices, with small widths.
    body = "\n".join(
        [
            *_sizes(model, cluster),
            *_mesh(cluster),
            *_layer(choice, model, cluster, dispatch),
            *_call(choice, model, gather_again),
        ]
    )
    return "\n".join([*_head(choice, cluster), *_imports(body), "", body, ""])


def _head(choice: Choice, cluster: Cluster) -> list[str]:
    ranks = cluster.num_ranks
    return [
        f"{WRITTEN}: {choice.name} on {ranks} accelerators.",
        "# Without them, JAX_PLATFORMS=cpu runs it on virtual devices of the CPU, with small sizes.",
    ]


def _imports(body: str) -> list[str]:
    used = [name for name in EXPORTS if re.search(rf"\b{name}\b", body)]
    line = f"from jax_moe_lb import {', '.join(used)}"
    if len(line) > MOST_COLUMNS:
        line = "\n".join(["from jax_moe_lb import (", *(f"    {name}," for name in used), ")"])
    by_replace = ["from dataclasses import replace", ""] if re.search(r"(?<!\.)\breplace\(", body) else []
    sharding = "from jax.sharding import AxisType, NamedSharding, PartitionSpec"
    return [*by_replace, "import jax", "import jax.numpy as jnp", "from flax import nnx", sharding, line]


def _sizes(model: ModelShape, cluster: Cluster) -> list[str]:
    shared = ("SHARED",) if model.shared_inner else ()
    values = (model.tokens, model.hidden, model.inner, *(model.shared_inner for _ in shared))
    names = ", ".join(("TOKENS", "HIDDEN", "INNER", *shared))
    axes = ", ".join(f'"{level.name}": {level.size}' for level in cluster.levels)
    return [
        f"SIZES = {{{axes}}}  # ranks along each mesh axis, outermost first",
        f"RANKS, EXPERTS, PER_TOKEN = {cluster.num_ranks}, {model.experts}, {model.per_token}",
        "",
        "use_virtual_cpu_devices(RANKS)  # no effect on accelerators",
        'if jax.default_backend() == "cpu":  # so small that a plan may not save time',
        f"    {names} = {', '.join([str(SMALL)] * len(values))}",
        "else:",
        f"    {names} = {', '.join(map(str, values))}  # tokens per rank, and widths",
        "",
    ]


def _mesh(cluster: Cluster) -> list[str]:
    topology = cluster.topology()
    rates = ", ".join(_number(level.bytes_per_s) for level in topology.levels)
    latencies = ", ".join(_number(level.latency_s) for level in topology.levels)
    comma = "," * (len(topology.levels) == 1)
    return [
        "mesh = jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Auto,) * len(SIZES))",
        "topology = Topology.from_mesh(",
        "    mesh,",
        "    tuple(SIZES),",
        f"    ranks_per_domain={topology.ranks_per_domain},",
        f"    rails_per_node={topology.rails_per_node},",
        f"    bytes_per_s=({rates}{comma}),",
        f"    latency_s=({latencies}{comma}),",
        f"    flops_per_s={_number(topology.flops_per_s)},",
        ")",
    ]


def _number(value: float | None) -> str:
    """Format a rate or a latency as the shortest float literal, such as 3.6e+11."""
    value = float(value or 0)
    short = f"{value:g}"
    return short if float(short) == value and not short.isdigit() else repr(value)


def _layer(choice: Choice, model: ModelShape, cluster: Cluster, dispatch: str) -> list[str]:
    lines, topology = _system(choice, dispatch), "topology"
    if choice.domain_sizes:
        levels = zip(cluster.levels, choice.domain_sizes, strict=True)
        sizes = ", ".join(f'"{level.name}": {size}' for level, size in levels)
        codec = f", transport.Codec(ratio={choice.ratio})" if choice.ratio != 1 else ""
        topology = "domains.between"
        lines = [
            f"mesh = transport.hybrid_mesh(mesh, {{{sizes}}})",
            "domains = transport.ExpertDomains.from_mesh(mesh, topology)",
            *lines,
            f"system = system.replace(migrate=transport.GatherExpertDomain(domains{codec}))",
        ]
    gated = "" if model.gated else ", gated=False"
    return [
        *lines,
        "layer = MoE(",
        "    HIDDEN,",
        "    EXPERTS,",
        "    TopK(PER_TOKEN),",
        "    mesh=mesh,",
        f"    topology={topology},",
        "    system=system,",
        f"    experts=ExpertConfig(INNER{gated}),",
        *["    shared=SharedExpert(SHARED),"] * bool(model.shared_inner),
        "    rngs=nnx.Rngs(0),",
        ")",
    ]


def _system(choice: Choice, dispatch: str) -> list[str]:
    base, changes = system_parts(choice, dispatch)
    if not changes:
        return [f"system = {base}"]
    return ["system = replace(", *(f"    {part}," for part in (base, *changes)), ")"]


def _call(choice: Choice, model: ModelShape, gather_again: bool) -> list[str]:
    dtype = jnp.dtype(DTYPES[max(model.itemsize, 2)]).name
    moves = f"# In training, call layer.update_loads(stats) in each step and relocate every {RELOCATE_INTERVAL} steps."
    return [
        "tokens = NamedSharding(mesh, PartitionSpec(mesh.axis_names))",
        f"shape, dtype = (RANKS * TOKENS, HIDDEN), jnp.{dtype}",
        "x = jax.jit(lambda key: jax.random.normal(key, shape, dtype), out_shardings=tokens)(jax.random.key(0))",
        "",
        "",
        "@nnx.jit",
        *["@nnx.remat  # the backward pass gathers the experts again"] * gather_again,
        "def forward(layer, x):",
        "    return layer(x)",
        "",
        "",
        *[moves] * choice.relocated,
        "y, stats = forward(layer, x)",
        "raise_on_fault(stats)",
        'print(f"imbalance {stats.imbalance_before} -> {stats.imbalance_after}, rounds {stats.rounds}")',
    ]
