"""Expert domains as mesh axes equal a dense layer, and use collectives only along links of Algorithm 1."""

import functools
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jax_moe_lb import Buffers, System, Topology, plain
from jax_moe_lb.balancers import HybridEP
from jax_moe_lb.transport import Direct, ExpertDomains, hybrid_mesh
from tests.algorithm_1 import collectives, connected, links, pairs
from tests.layer_cases import (
    Case,
    assert_close,
    assert_equals_dense,
    expert_domains,
    hybrid_moe,
    make_mesh,
    sharded_moe,
    with_gradients,
)

NAMES = ("dc", "node", "gpu")


def domains_of(sizes, domain_sizes, mesh=None, **options):
    """Return split levels of these sizes, the innermost called gpu, in a topology with these options."""
    names = NAMES[-len(sizes) :]
    mesh = make_mesh(sizes, names) if mesh is None else mesh
    return expert_domains(mesh, dict(zip(names, domain_sizes, strict=True)), names, **options)


@functools.cache
def inputs():
    return Case(num_tokens=12, gated=False).arguments("zipf", 8)


def check_groups(hlo, sizes, domain_sizes, backward=True):
    """Check that every collective of a training step, or of its forward pass, connects ranks as in Algorithm 1."""
    gathered, exchanged, scattered = set(), set(), set()
    for operation, dtype, groups in collectives(hlo):
        if operation == "all-gather" and dtype == "f32":
            gathered.add(frozenset(pairs(groups)))
        elif operation == "reduce-scatter":
            scattered.add(frozenset(pairs(groups)))
        elif operation in ("all-to-all", "all-gather"):  # addresses of tokens and their counts
            exchanged.add(frozenset(pairs(groups)))
        else:
            assert operation == "all-reduce", operation  # gradients of the router
    levels = range(len(sizes))
    gather = {frozenset(links("gather", level, sizes, domain_sizes)) for level in levels}
    exchange = set().union(*(links("exchange", level, sizes, domain_sizes) for level in levels))
    assert gathered == gather - {frozenset()}
    assert scattered == (gathered if backward else set())
    # XLA keeps gathers of counts over a single rank, which connect none.
    assert exchanged - {frozenset()} == ({frozenset(connected(exchange))} if exchange else set())
    return sum(map(len, gather)), len(exchange)


# One level, and two levels with domains across both.
SPLITS = [
    pytest.param((8,), (1,), marks=pytest.mark.thorough),
    pytest.param((8,), (2,), marks=pytest.mark.thorough),
    ((2, 4), (2, 2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "domain_sizes"), SPLITS, ids=str)
def test_layer_equals_dense_and_joins_ranks_as_algorithm_1_does(sizes, domain_sizes):
    mesh, domains = domains_of(sizes, domain_sizes)
    program = with_gradients(hybrid_moe(mesh, domains, plain())).lower(*inputs()).compile()
    stats = assert_equals_dense(program, inputs(), 1e-5)
    assert stats.counts.shape[:2] == (domains.domain_size, 8 // domains.domain_size)
    check_groups(program.as_text(), sizes, domain_sizes)
    if domain_sizes == (1,):
        base = make_mesh((8,), ("gpu",))
        layer = with_gradients(sharded_moe(base, Topology.from_mesh(base, "gpu"), plain()))
        jax.tree.map(np.testing.assert_array_equal, program(*inputs()), layer(*inputs()))


# Table VII: directed pairs of ranks, (exchange, gather), for S = 1, 2, 4 ...
TABLE_VII = {
    8: [(56, 0), (24, 8), (8, 24), (0, 56)],
    16: [(240, 0), (112, 16), (48, 48), (16, 112), (0, 240)],
    32: [(992, 0), (480, 32), (224, 96), (96, 224), (32, 480), (0, 992)],
}


def test_table_vii():
    for size, counts in TABLE_VII.items():
        for power, (exchange, gather) in enumerate(counts):
            assert len(links("exchange", 0, (size,), (2**power,))) == exchange
            assert len(links("gather", 0, (size,), (2**power,))) == gather


def compile_all():
    """Compile a small layer for every size and domain size of the table, in a process of 32 devices."""
    for size, table in TABLE_VII.items():
        base = Mesh(np.asarray(jax.devices()[:size]), ("gpu",), axis_types=(AxisType.Auto,))
        case = Case(num_tokens=4, num_experts=32, mlp_dim=4, gated=False)
        operands = case.arguments("zipf", size)[:4]
        for power, counts in enumerate(table):
            mesh, domains = domains_of((size,), (2**power,), base)
            hlo = jax.jit(hybrid_moe(mesh, domains, plain())).lower(*operands).compile().as_text()
            assert check_groups(hlo, (size,), (2**power,), backward=False) == counts[::-1], (size, power)
    print("done")


@pytest.mark.thorough
def test_compiled_groups_are_those_of_table_vii():
    code = (
        "from jax_moe_lb import use_virtual_cpu_devices; use_virtual_cpu_devices(32)\n"
        "from tests.transport.test_expert_domains import compile_all; compile_all()"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=600)
    assert done.stdout.endswith("done\n"), done.stderr[-2000:]


@pytest.mark.thorough
def test_the_plan_of_hybridep_serves_what_the_gathered_layer_serves():
    """Two executions of one plan: all ranks in one group, or equal offsets in separate groups."""
    mesh, domains = domains_of((8,), (2,))
    whole = System(HybridEP(), dispatch=Direct(Buffers(4.0)), replica_slots=2)
    (y, stats), gradients = with_gradients(sharded_moe(mesh, domains.whole, whole))(*inputs())
    between = with_gradients(hybrid_moe(mesh, domains, plain(Buffers(4.0))))
    (want, between_stats), want_gradients = between(*inputs())
    assert_close((y, gradients), (want, want_gradients), 1e-6)
    # Loads by domain and offset, and by offset and domain.
    np.testing.assert_array_equal(stats.load_after.reshape(4, 2), between_stats.load_after.T)


# The ranks of equal offset in one domain of the hardware.
HARDWARE = [
    ((2, 4), (2, 2), 4, 2),
    ((2, 4), (1, 4), 4, 1),
    ((8,), (1,), 4, 4),
    ((8,), (2,), 4, 2),
    ((8,), (2,), 2, 1),
    ((8,), (4,), 2, 1),
    ((4, 2), (2, 1), 4, 2),
    ((4, 2), (1, 2), 4, 2),
]


@pytest.mark.parametrize(("sizes", "domain_sizes", "hardware", "expected"), HARDWARE, ids=str)
def test_domains_of_the_hardware_shrink(sizes, domain_sizes, hardware, expected):
    between = domains_of(sizes, domain_sizes, ranks_per_domain=hardware)[1].between
    assert between.ranks_per_domain == expected


def test_ranks_are_numbered_by_domain():
    mesh, domains = domains_of((2, 4), (2, 2))
    assert mesh.axis_names == ("node_domain", "node_offset", "gpu_domain", "gpu_offset")
    assert domains.expert_axes == ("node_domain", "gpu_domain", "gpu_offset", "node_offset")
    assert domains.domain_size == domains.whole.ranks_per_domain == 4
    assert [level.size for level in domains.between.levels] == [1, 2]


def test_groups_have_the_processes_of_their_ranks_and_the_axes_of_the_topology():
    mesh = make_mesh((2, 2, 2), ("dc", "gpu", "tensor"))
    topology = Topology.from_mesh(mesh, ("dc", "gpu"), tensor_axes="tensor")
    domains = ExpertDomains.from_mesh(hybrid_mesh(mesh, {"dc": 1, "gpu": 2}), topology)
    assert domains.between.in_one_process
    for group in (domains.between, domains.whole):
        assert (group.tensor_axes, group.platform) == (("tensor",), "cpu")


def test_bad_domains_are_named():
    mesh = make_mesh((2, 4), ("dc", "gpu"))
    with pytest.raises(ValueError, match=r"domain_sizes\['gpu'\] is 3; expected a divisor of the axis' size 4"):
        hybrid_mesh(mesh, {"gpu": 3})
    with pytest.raises(ValueError, match=r"domain_sizes\['gpu'\] is 0"):
        hybrid_mesh(mesh, {"gpu": 0})
    with pytest.raises(ValueError, match="domain_sizes names 'node'; expected an axis of the mesh"):
        hybrid_mesh(mesh, {"node": 2})
    topology = Topology.from_mesh(mesh, ("dc", "gpu"))
    with pytest.raises(ValueError, match=r"the mesh splits 'dc' into \{'dc_domain': 0"):
        ExpertDomains.from_mesh(hybrid_mesh(mesh, {"gpu": 2}), topology)
    with pytest.raises(ValueError, match=r"the mesh splits 'gpu' into .* expected parts of the topology's 4 members"):
        ExpertDomains.from_mesh(hybrid_mesh(make_mesh((2, 2), ("dc", "gpu")), {"dc": 1, "gpu": 2}), topology)
    with pytest.raises(ValueError, match="topology has no expert_axes"):
        ExpertDomains.from_mesh(mesh, Topology.flat(8))
    with pytest.raises(ValueError, match="different names"):
        hybrid_mesh(make_mesh((2, 2), ("dc", "dc_domain")), {"dc": 1})


def test_the_plan_of_hybridep_refuses_a_size_that_is_no_part_of_its_domain():
    mesh, domains = domains_of((8,), (2,))
    with pytest.raises(ValueError, match="domain_size is 4; expected a divisor of the plan's domain of 2 ranks"):
        jax.eval_shape(sharded_moe(mesh, domains.whole, System(HybridEP(4))), *inputs()[:4])
