from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jax_moe_lb import Topology
from jax_moe_lb.core import Level
from jax_moe_lb.core.topology import _ranks_per_process as ranks_per_process
from tests.layer_cases import make_mesh


def test_one_axis_is_one_level():
    topology = Topology.from_mesh(make_mesh((2, 4), ("data", "expert")))
    assert topology.levels == (Level("gpu", 4),)
    assert (topology.num_ranks, topology.ranks_per_domain, topology.num_domains) == (4, 4, 1)
    assert topology.expert_axes == ("expert",)
    assert topology.data_axes == ("data",)


def test_axes_become_the_innermost_levels():
    mesh = make_mesh((2, 2, 2), ("a", "b", "c"))
    topology = Topology.from_mesh(mesh, ("a", "b", "c"), bytes_per_s=(1e9, 2e9, 4e9), latency_s=(1e-2, 1e-5, 1e-6))
    assert [level.name for level in topology.levels] == ["dc", "node", "gpu"]
    assert topology.levels[0] == Level("dc", 2, 1e9, 1e-2)
    assert (topology.num_ranks, topology.ranks_per_domain, topology.data_axes) == (8, 2, ())
    two = Topology.from_mesh(mesh, ("b", "c"), ranks_per_domain=4)
    assert [level.name for level in two.levels] == ["node", "gpu"]
    assert (two.ranks_per_domain, two.data_axes) == (4, ("a",))


def test_a_block_of_ranks_is_a_group_of_its_own():
    whole = Topology.from_mesh(make_mesh((2, 2, 2), ("a", "b", "c")), ("a", "b", "c"), bytes_per_s=(1e9, 2e9, 4e9))
    for size, axes, together in ((2, ("c",), 2), (4, ("b", "c"), 4)):
        block = whole.inside(size)
        assert (block.num_ranks, block.ranks_per_domain, block.ranks_per_process) == (size, 2, together)
        assert block.expert_axes == axes
        assert block.data_axes + block.expert_axes == ("a", "b", "c")
        assert block.levels == whole.levels[-len(axes) :]
    assert all(whole.inside(size) is whole for size in (1, 3, 8))
    flat = Topology.flat(8, 4)
    assert flat.inside(4) is flat
    assert replace(whole, ranks_per_process=None).inside(4).ranks_per_process is None
    assert replace(whole, ranks_per_process=1).inside(4).ranks_per_process == 1


def test_a_topology_is_a_static_argument():
    mesh = make_mesh((2, 4), ("data", "expert"))
    assert hash(Topology.from_mesh(mesh)) == hash(Topology.from_mesh(mesh))


def test_data_axes_are_said_or_all_others():
    mesh = AbstractMesh((2, 2, 2), ("data", "expert", "tensor"))
    assert Topology.from_mesh(mesh).data_axes == ("data", "tensor")
    assert Topology.from_mesh(mesh, data_axes="data").data_axes == ("data",)
    assert Topology.from_mesh(mesh, data_axes=()).data_axes == ()
    for wrong in ("expert", "fsdp", ("data", "data")):
        with pytest.raises(ValueError, match=r"data_axes is .*; expected distinct axes of \('data', 'tensor'\)"):
            Topology.from_mesh(mesh, data_axes=wrong)


@pytest.mark.parametrize(
    ("processes", "axes", "together"),
    [
        ([[0, 0, 1, 1], [0, 0, 1, 1]], ("expert",), 2),
        ([[0, 0, 0, 0], [1, 1, 1, 1]], ("expert",), 4),
        ([[0, 1, 2, 3], [0, 1, 2, 3]], ("expert",), 1),
        ([[0, 0, 0, 0], [1, 1, 1, 1]], ("data", "expert"), 4),
        ([[0, 0, 0, 0], [1, 1, 1, 1]], ("expert", "data"), 1),
        ([[0, 0, 0, 1], [1, 1, 1, 1]], ("expert",), 1),
    ],
)
def test_ranks_that_share_a_process_are_read_off_the_mesh(processes, axes, together):
    devices = np.vectorize(lambda process: SimpleNamespace(process_index=process), otypes=[object])(processes)
    assert ranks_per_process(devices, ("data", "expert"), axes) == together
    assert Topology.from_mesh(make_mesh((2, 4), ("data", "expert"))).ranks_per_process == 4
    assert Topology.from_mesh(AbstractMesh((4,), ("expert",))).ranks_per_process is None
