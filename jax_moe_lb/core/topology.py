"""The ranks of an expert-parallel group, their domains and rails, and the rates between them.

The checks of sizes that several modules share stand here too, each with one message.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

INT32_MAX = np.iinfo(np.int32).max


def home_experts_per_rank(num_experts: int, num_ranks: int, holder: str | None = None) -> int:
    """Returns `L = E / R`, the number of experts that are at home on every rank, and refuses others.

    Args:
        num_experts: `E`, the number of experts of a layer.
        num_ranks: `R`, the number of ranks in the expert-parallel group.
        holder: what the message calls the argument that has so many experts; `None`: they are `num_experts` themselves.

    Raises:
        ValueError: `E` is not a positive multiple of `R`.

    Examples:
        >>> home_experts_per_rank(128, 8)
        16
    """
    if num_experts < 1 or num_experts % num_ranks:
        found = f"num_experts is {num_experts}" if holder is None else f"{holder} has {num_experts} experts"
        raise ValueError(f"{found}; expected a positive multiple of the {num_ranks} ranks")
    return num_experts // num_ranks


def check_domain(domain: int, num_ranks: int, argument: str = "domain") -> None:
    """Refuses domains that do not cut the ranks into equal blocks.

    Args:
        domain: how many ranks a domain has.
        num_ranks: `R`, the number of ranks in the expert-parallel group.
        argument: what the message calls the domain.

    Raises:
        ValueError: it is not a divisor of the ranks.
    """
    if domain < 1 or num_ranks % domain:
        raise ValueError(f"{argument} is {domain}; expected a divisor of the {num_ranks} ranks")


def check_total(counts: Any) -> None:
    """Refuses counts on a host whose sum does not fit int32, planning's integer type; what is traced passes.

    Args:
        counts: integers of any shape.

    Raises:
        ValueError: the sum is larger; a sum in int32 would wrap round to another number.
    """
    # A sum of unsigned 64-bit counts could wrap round too; float64 is exact far beyond int32.
    if isinstance(counts, np.ndarray) and (total := counts.sum(dtype=np.float64)) > INT32_MAX:
        raise ValueError(f"counts sum to {total:.0f} tokens; expected at most {INT32_MAX}")


LEVEL_NAMES = ("dc", "node", "gpu")


@dataclass(frozen=True)
class Level:
    """A level is one step of the machine's hierarchy, such as the nodes of a datacenter.

    Give levels to `Topology` where there is no mesh to read them from. Rates and latencies are needed only by what
    decides by them: `choose_expert_domains` and the simulator.

    Args:
        name: `"dc"`, `"node"` or `"gpu"`.
        size: members of this level inside one member of the next outer level; usually 8 for the GPUs of a node.
        bytes_per_s: what one rank can send to a rank that differs at this level, in bytes per second and one direction;
            usually 50e9 with a 400 Gbit/s interface for each GPU. `None` if unknown.
        latency_s: the time from such a rank to the other, in seconds; usually some microseconds. `None` if unknown.

    Examples:
        >>> from jax_moe_lb.core import Level
        >>> Level("node", size=4, bytes_per_s=50e9, latency_s=5e-6).size
        4
    """

    name: str
    size: int
    bytes_per_s: float | None = None
    latency_s: float | None = None

    def __post_init__(self) -> None:
        if self.name not in LEVEL_NAMES:
            raise ValueError(f"Level.name is {self.name!r}; expected one of {LEVEL_NAMES}")
        _require_positive(f"Level({self.name!r}).size", self.size)
        # A comparison with NaN is false, so that `not ... > 0` refuses it too.
        if self.bytes_per_s is not None and not self.bytes_per_s > 0:
            raise ValueError(f"Level({self.name!r}).bytes_per_s is {self.bytes_per_s}; expected > 0")
        if self.latency_s is not None and not self.latency_s >= 0:
            raise ValueError(f"Level({self.name!r}).latency_s is {self.latency_s}; expected >= 0")


@dataclass(frozen=True)
class Topology:
    """A topology describes the expert-parallel group: its levels, domains, rails and mesh axes.

    For a layer read it off the mesh, with `from_mesh`; to plan for recorded counts `flat` is enough. It is hashable, so
    that it can be a static argument of `jax.jit`. Ranks are numbered row-major over `levels`, outermost first, as
    `jax.lax.axis_index` numbers them.

    Args:
        levels: the levels of the machine, outermost first; the product of their sizes is `R`.
        ranks_per_domain: `M`, the ranks among which expert weights may move; divides `R`. Usually the ranks that NVLink
            connects: 8 in a node, up to 72 in a rack.
        rails_per_node: `N`, network interfaces of a node, which `ranks_per_node` ranks share; usually one per GPU.
        expert_axes: the mesh axes that make up the group, outermost first; empty for a topology that only plans.
        data_axes: the mesh axes over which tokens, but not experts, are split.
        tensor_axes: the mesh axes over which the inner width `F` of every expert is split (expert tensor parallelism).
        flops_per_s: what one rank computes, in floating-point operations per second; `None` if unknown.
        ranks_per_process: how many consecutive ranks are always devices of one process, which can reach each other's
            memory; `None` if unknown, and then only a program of one process takes them for such.
        processes: the process of each rank of each group, one group after the other, where every device of the mesh is
            a process of its own; else empty. Processes of one machine can copy from each other's memory.
        platform: `"cpu"`, `"gpu"` or `"tpu"`, the platform of the mesh's devices; `None` if unknown.

    Examples:
        Two nodes of four GPUs each, where weights move inside nodes:

        >>> from jax_moe_lb import Topology

        >>> from jax_moe_lb.core import Level
        >>> topology = Topology((Level("node", 2), Level("gpu", 4)), ranks_per_domain=4)
        >>> topology.num_ranks, topology.num_domains, topology.ranks_per_node
        (8, 2, 4)
    """

    levels: tuple[Level, ...]
    ranks_per_domain: int
    rails_per_node: int = 1
    expert_axes: tuple[str, ...] = ()
    data_axes: tuple[str, ...] = ()
    tensor_axes: tuple[str, ...] = ()
    flops_per_s: float | None = None
    ranks_per_process: int | None = None
    processes: tuple[int, ...] = ()
    platform: str | None = None

    def __post_init__(self) -> None:
        # Ranks are numbered outermost level first, as the mesh numbers them: another order would mix them up.
        order = [LEVEL_NAMES.index(level.name) for level in self.levels]
        if not self.levels or order != sorted(set(order)):
            names = [level.name for level in self.levels]
            raise ValueError(f"Topology.levels are {names}; expected some of {LEVEL_NAMES}, in this order")
        _require_positive("Topology.ranks_per_domain", self.ranks_per_domain)
        _require_positive("Topology.rails_per_node", self.rails_per_node)
        if self.num_ranks % self.ranks_per_domain:
            raise ValueError(
                f"Topology.ranks_per_domain is {self.ranks_per_domain}; "
                f"expected a divisor of the {self.num_ranks} ranks"
            )
        if self.flops_per_s is not None and not self.flops_per_s > 0:
            raise ValueError(f"Topology.flops_per_s is {self.flops_per_s}; expected > 0")

    @property
    def num_ranks(self) -> int:
        """Counts the ranks of the group, `R`."""
        return math.prod(level.size for level in self.levels)

    @property
    def ranks_per_node(self) -> int:
        """Counts the ranks that share the rails: those inside the innermost level, or a domain where that is smaller.

        Expert weights may move further, over the rails, where `ranks_per_domain` says so.
        """
        return min(self.levels[-1].size, self.ranks_per_domain)

    @property
    def in_one_process(self) -> bool:
        """Whether all ranks of each group are devices of one process; false if unknown."""
        return self.ranks_per_process == self.num_ranks

    @property
    def nodes_in_one_process(self) -> bool:
        """Whether the ranks of each node are devices of one process; false if unknown."""
        return self.ranks_per_process is not None and self.ranks_per_process % self.ranks_per_node == 0

    @property
    def num_domains(self) -> int:
        """Counts the domains of the group, `R / M`."""
        return self.num_ranks // self.ranks_per_domain

    @classmethod
    def flat(cls, num_ranks: int, ranks_per_domain: int | None = None) -> "Topology":
        """Makes a group of one level, off any mesh, which is all that a planner needs to know.

        Args:
            num_ranks: `R`.
            ranks_per_domain: `M`; `None` makes all ranks one domain.

        Examples:
            >>> from jax_moe_lb import Topology
            >>> Topology.flat(16, ranks_per_domain=8).num_domains
            2
        """
        _require_positive("num_ranks", num_ranks)
        return cls((Level("gpu", num_ranks),), num_ranks if ranks_per_domain is None else ranks_per_domain)

    @classmethod
    def from_mesh(
        cls,
        mesh: Mesh | AbstractMesh,
        expert_axis: str | tuple[str, ...] = "expert",
        *,
        data_axes: str | tuple[str, ...] | None = None,
        tensor_axes: str | tuple[str, ...] = (),
        ranks_per_domain: int | None = None,
        rails_per_node: int = 1,
        bytes_per_s: tuple[float, ...] | None = None,
        latency_s: tuple[float, ...] | None = None,
        flops_per_s: float | None = None,
    ) -> "Topology":
        """Reads the topology off a mesh, for `nn.MoE` or `moe`.

        Args:
            mesh: the axes named in `expert_axis` form the group.
            expert_axis: one name, or up to three, outermost first: they become the innermost of the levels dc, node and
                gpu.
            data_axes: the axes over which tokens are split beside the group, such as `("data", "fsdp")`. Over further
                ones all devices do the same. `None`, the default: all axes but those of the group and of tensors.
            tensor_axes: the axes over which the inner width of every expert is split, which have the same tokens;
                usually none, since a group of more ranks makes larger products.
            ranks_per_domain: `M`; `None` takes the size of the innermost axis.
            rails_per_node: `N`, network interfaces of a node; only `RailS` and `MultiRailDispatch` need more than 1.
            bytes_per_s: what a rank sends along each axis, in bytes per second, in the order of `expert_axis`.
            latency_s: the one-way latency along each axis, in seconds, in the order of `expert_axis`.
            flops_per_s: what one rank computes, in floating-point operations per second.

        Raises:
            ValueError: the mesh lacks an axis, there are more than three, or the number of rates differs from that of
                the axes.

        Examples:
            >>> from jax.sharding import AbstractMesh
            >>> from jax_moe_lb import Topology
            >>> topology = Topology.from_mesh(AbstractMesh((2, 4, 8), ("data", "node", "expert")), ("node", "expert"))
            >>> topology.num_ranks, topology.ranks_per_domain, topology.data_axes
            (32, 8, ('data',))
        """
        axes = (expert_axis,) if isinstance(expert_axis, str) else tuple(expert_axis)
        if not 1 <= len(set(axes)) == len(axes) <= len(LEVEL_NAMES):
            raise ValueError(f"expert_axis is {expert_axis!r}; expected one to three different mesh axes")
        tensor = (tensor_axes,) if isinstance(tensor_axes, str) else tuple(tensor_axes)
        others = tuple(axis for axis in mesh.axis_names if axis not in axes + tensor)
        data = others if data_axes is None else (data_axes,) if isinstance(data_axes, str) else tuple(data_axes)
        for axis in axes:
            if axis not in mesh.axis_names:
                raise ValueError(f"expert_axis names {axis!r}; expected an axis of the mesh, one of {mesh.axis_names}")
        if len(set(data)) < len(data) or not set(data) <= set(others):
            raise ValueError(
                f"data_axes is {data_axes!r}; expected different ones of {others}, beside those of experts"
            )
        beside = tuple(axis for axis in mesh.axis_names if axis not in axes)
        if len(set(tensor)) < len(tensor) or not set(tensor) <= set(beside):
            raise ValueError(
                f"tensor_axes is {tensor_axes!r}; expected different ones of {beside}, beside those of experts"
            )
        rates = _per_axis("bytes_per_s", bytes_per_s, axes)
        latencies = _per_axis("latency_s", latency_s, axes)
        # The innermost axis is the fastest level, so a mesh with one axis has GPUs and no nodes.
        names = LEVEL_NAMES[-len(axes) :]
        sizes = [mesh.shape[axis] for axis in axes]
        levels = tuple(map(Level, names, sizes, rates, latencies))
        return cls(
            levels=levels,
            ranks_per_domain=levels[-1].size if ranks_per_domain is None else ranks_per_domain,
            rails_per_node=rails_per_node,
            expert_axes=axes,
            data_axes=data,
            tensor_axes=tensor,
            flops_per_s=flops_per_s,
            ranks_per_process=(
                _ranks_per_process(mesh.devices, mesh.axis_names, axes) if isinstance(mesh, Mesh) else None
            ),
            processes=_own_processes(mesh.devices, mesh.axis_names, axes) if isinstance(mesh, Mesh) else (),
            platform=_platform(mesh.devices) if isinstance(mesh, Mesh) else None,
        )


def _platform(devices: np.ndarray) -> str:
    # A device of a compile-only topology has the name of the lowering platform.
    platform = devices.flat[0].platform
    return "gpu" if platform in ("cuda", "rocm") else platform


def _ranks_per_process(devices: np.ndarray, names: tuple[str, ...], axes: tuple[str, ...]) -> int:
    """The largest number of consecutive ranks that divides the group, and has no two processes in any block of it."""
    groups = _processes_by_group(devices, names, axes)
    ranks = groups.shape[1]
    for size in (size for size in range(ranks, 1, -1) if ranks % size == 0):
        blocks = groups.reshape(-1, size)
        if (blocks == blocks[:, :1]).all():
            return size
    return 1


def _own_processes(devices: np.ndarray, names: tuple[str, ...], axes: tuple[str, ...]) -> tuple[int, ...]:
    """The process of each rank of each group, if no two devices of the mesh belong to one and there are several."""
    processes = tuple(_processes_by_group(devices, names, axes).flatten().tolist())
    return processes if 1 < len(processes) == len(set(processes)) else ()


def _processes_by_group(devices: np.ndarray, names: tuple[str, ...], axes: tuple[str, ...]) -> np.ndarray:
    process = np.vectorize(lambda device: device.process_index, otypes=[int])(devices)
    order = [names.index(axis) for axis in axes]
    ranks = math.prod(process.shape[axis] for axis in order)
    return np.moveaxis(process, order, range(-len(order), 0)).reshape(-1, ranks)


def _per_axis(name: str, values: tuple[float, ...] | None, axes: tuple[str, ...]) -> tuple[float | None, ...]:
    if values is None:
        return (None,) * len(axes)
    if len(values) != len(axes):
        raise ValueError(f"{name} has {len(values)} values; expected one per expert axis {axes}")
    return tuple(values)


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} is {value}; expected at least 1")
