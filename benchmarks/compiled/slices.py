"""A layer over two TPU slices: buffers of transfers between and inside slices, by what travels between them.

Requires the compiler: the extra `tpu`, as installed by `ci/accelerators.sh` into `.venv-accelerators`. A compilation
takes two minutes. Rows have the reference sizes, forward and gradients, in one round.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.render.results import Table, Value
from jax_moe_lb import ExpertConfig, MoE, Precision, System, TopK, Topology, exact, plain
from jax_moe_lb.aot import LayerSizes, ProgramReport, Target, quiet_stderr, use_no_accelerators
from jax_moe_lb.aot.layer import LayerProgram
from jax_moe_lb.transport import Direct, ExpertDomains, GatherExpertDomain, hybrid_mesh

TARGETS = ("v5e:2x4:2", "v6e:2x4:2")
SIZES = LayerSizes()

SYSTEMS = {
    "plain, every rank to every rank": (plain(max_rounds=1, dispatch=Direct()), False),
    "plain, once per slice": (plain(max_rounds=1), False),
    "exact, once per slice": (exact(max_rounds=1), False),
    "exact, experts of both slices": (exact(max_rounds=1), True),
}
"""Systems, and whether each rank gathers its experts of the other slice, as HybridEP's expert domains."""

COLUMNS = {"target": "", "layer": "", "temporaries MB": ".0f", "between slices: transfers": "d", "MB": ".0f"}
COLUMNS |= {"of them beside work": "d", "inside slices: exchanges": "d", "their MB": ".0f"}


def benchmark(given: object) -> Mapping[str, Table]:
    use_no_accelerators()
    rows: list[list[Value]] = []
    for name in TARGETS:
        for layer, (system, gathers) in SYSTEMS.items():
            with quiet_stderr():
                report = compiled(Target.parse(name), system, gathers)
            rows.append([name, layer, *numbers(report)])
            print(rows[-1], flush=True)
    return {"layers": Table(COLUMNS, rows)}


def compiled(target: Target, system: System, gathers: bool) -> ProgramReport:
    """Compile a layer over all slices, or over each slice with the experts of all."""
    whole = target.mesh()
    mesh, topology = whole, Topology.from_mesh(whole, whole.axis_names)
    if gathers:
        mesh = hybrid_mesh(whole, {"node": target.num_slices, "expert": 1})
        domains = ExpertDomains.from_mesh(mesh, topology)
        system, topology = system.replace(migrate=GatherExpertDomain(domains)), domains.between
    options = {"mesh": mesh, "topology": topology, "system": system, "experts": ExpertConfig(SIZES.inner)}
    options |= {"precision": Precision(jnp.bfloat16, jnp.bfloat16)}

    def make() -> MoE:
        return MoE(SIZES.hidden, SIZES.experts, TopK(SIZES.per_token), rngs=nnx.Rngs(0), **options)

    tokens = jax.ShapeDtypeStruct((whole.size * SIZES.tokens, SIZES.hidden), jnp.bfloat16)
    return LayerProgram(nnx.eval_shape(make), tokens, "uniform").compile(system, {})


def numbers(report: ProgramReport) -> list[Value]:
    """Return temporaries, and executions and bytes of transfers between slices and inside them."""
    between = [one for one in report.collectives if one.kind.endswith("between slices")]
    inside = [one for one in report.collectives if one not in between and one.axes]
    counts = [(sum(one.count for one in some), sum(one.nbytes for one in some) / 1e6) for some in (between, inside)]
    return [report.temp_bytes / 1e6, *counts[0], sum(one.asynchronous for one in between), *counts[1]]
