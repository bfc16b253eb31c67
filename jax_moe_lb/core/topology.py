"""Ranks of an expert-parallel group, their domains and rails, and link rates.

The module also holds the size checks shared by several modules, so each has one message.
"""

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jax_moe_lb.core.checks import Count, NonNegative, Positive, check_value, checked_fields, shown
from jax_moe_lb.core.torus import has_limited_routing, slice_axes, torus_warning
from jax_moe_lb.core.types import AnyArray

INT32_MAX = np.iinfo(np.int32).max


def home_experts_per_rank(num_experts: int, num_ranks: int, holder: str | None = None) -> int:
    """Return `L = E / R`, the number of home experts per rank."""
    if num_experts < 1 or num_experts % num_ranks:
        found = f"num_experts is {num_experts}" if holder is None else f"{holder} has {num_experts} experts"
        raise ValueError(f"{found}; expected a positive multiple of the {num_ranks} ranks")
    return num_experts // num_ranks


def check_domain(domain: int, num_ranks: int, argument: str = "domain") -> None:
    """Check that domains partition the ranks into equal blocks."""
    if domain < 1 or num_ranks % domain:
        raise ValueError(f"{argument} is {domain}; expected a divisor of the {num_ranks} ranks")


def check_host_counts(counts: AnyArray) -> None:
    """Check that host counts are at least 0 and that their sum fits int32, the integer type of planning."""
    # A larger sum would wrap around in int32. Traced counts are not checked.
    if isinstance(counts, np.ndarray) and (counts < 0).any():
        rank, expert = np.argwhere(counts < 0)[0]
        raise ValueError(
            f"counts of rank {rank}, expert {expert} is {counts[rank, expert]}; expected at least 0 tokens"
        )
    # A sum of unsigned 64-bit counts can wrap around, too. float64 is exact far beyond int32.
    if isinstance(counts, np.ndarray) and (total := counts.sum(dtype=np.float64)) > INT32_MAX:
        raise ValueError(f"counts sum to {total:.0f} tokens; expected at most {INT32_MAX}")


LEVEL_NAMES = ("dc", "node", "gpu")


@dataclass(frozen=True)
@checked_fields
class Level:
    """One level of the machine hierarchy, such as the nodes of a datacenter.

    Pass levels to `Topology` if there is no mesh. Rates and latencies are needed only for decisions by time:
    `choose_expert_domains`, `Cost`, `FasterMoE` and the simulator.

    Args:
        name: `"dc"`, `"node"` or `"gpu"`.
        size: number of members inside one member of the next outer level, such as 8 GPUs per node.
        bytes_per_s: one-way rate from a rank to a rank differing at this level, in bytes per second; `None` if unknown.
            A 400 Gbit/s interface per GPU gives 50e9.
        latency_s: one-way latency between two such ranks, in seconds, usually some microseconds; `None` if unknown.

    Raises:
        ValueError: `name` is unknown, `size` or `bytes_per_s` is not positive, or `latency_s` is negative.

    Examples:
        >>> from jax_moe_lb.core import Level
        >>> Level("node", size=4, bytes_per_s=50e9, latency_s=5e-6).size
        4
    """

    name: str
    size: Count
    bytes_per_s: Positive | None = None
    latency_s: NonNegative | None = None

    def __post_init__(self) -> None:
        if self.name not in LEVEL_NAMES:
            raise ValueError(f"Level.name is {shown(self.name)}; expected one of {LEVEL_NAMES}")


@dataclass(frozen=True)
@checked_fields
class Topology:
    """Levels, domains, rails and mesh axes of an expert-parallel group.

    Use `from_mesh` for a layer and `flat` for planning with recorded counts. A topology is hashable, so it can be a
    static argument of `jax.jit`. Ranks are numbered row-major over `levels`, outermost first, as in
    `jax.lax.axis_index`.

    Args:
        levels: levels of the machine, outermost first; the product of their sizes is `R`.
        ranks_per_domain: `M`, ranks per domain; a divisor of `R`. Expert weights move inside a domain only. Usually a
            domain is one NVLink domain: 8 ranks in a node, up to 72 in a rack.
        rails_per_node: `N`, network interfaces shared by the `ranks_per_node` ranks of a node; 1 (default). Usually one
            per GPU.
        expert_axes: mesh axes of the group, outermost first; empty (default) for planning only.
        data_axes: mesh axes sharding tokens but not experts; empty (default).
        tensor_axes: mesh axes sharding the inner width `F` of every expert (expert tensor parallelism); empty
            (default).
        flops_per_s: floating-point operations per second of one rank; `None` (default) if unknown.
        ranks_per_process: number of consecutive ranks always belonging to one process. Devices of one process can
            access each other's memory. `None` (default) if unknown; then ranks share a process only in a single-process
            program.
        processes: process index per rank, group by group, if every device of the mesh belongs to a process of its
            own; else empty (default). Processes of one machine can copy from each other's memory.
        platform: `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`, the platform of the mesh's devices; None (default) if unknown.
        device_kind: JAX's `device_kind` of accelerators, such as `"TPU v5 lite"`; None (default) if unknown.
        limited_routing: whether the devices belong to a slice of TPU v5e with more than 16 chips, for which XLA has no
            ragged exchange; False (default).
        slice_axes: expert axes along which the devices are of several TPU slices; empty (default).

    Raises:
        ValueError: levels are missing or out of order, `ranks_per_domain` does not divide `R`, or a number is not
            positive.

    Examples:
        Two nodes of four GPUs each; weights move inside nodes:

        >>> from jax_moe_lb import Topology

        >>> from jax_moe_lb.core import Level
        >>> topology = Topology((Level("node", 2), Level("gpu", 4)), ranks_per_domain=4)
        >>> topology.num_ranks, topology.num_domains, topology.ranks_per_node
        (8, 2, 4)
    """

    levels: tuple[Level, ...]
    ranks_per_domain: Count
    rails_per_node: Count = 1
    expert_axes: tuple[str, ...] = ()
    data_axes: tuple[str, ...] = ()
    tensor_axes: tuple[str, ...] = ()
    flops_per_s: Positive | None = None
    ranks_per_process: Count | None = None
    processes: tuple[int, ...] = ()
    platform: str | None = None
    device_kind: str | None = None
    limited_routing: bool = False
    slice_axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # The mesh numbers ranks outermost level first, so levels must have this order.
        order = [LEVEL_NAMES.index(level.name) for level in self.levels]
        if not self.levels or order != sorted(set(order)):
            names = [level.name for level in self.levels]
            raise ValueError(f"Topology.levels are {names}; expected some of {LEVEL_NAMES}, in this order")
        if self.num_ranks % self.ranks_per_domain:
            raise ValueError(
                f"Topology.ranks_per_domain is {self.ranks_per_domain}; "
                f"expected a divisor of the {self.num_ranks} ranks"
            )

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the group, `R`."""
        return math.prod(level.size for level in self.levels)

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks sharing the rails: the smaller of innermost level and domain.

        A domain larger than a node moves expert weights over the rails.
        """
        return min(self.levels[-1].size, self.ranks_per_domain)

    @property
    def in_one_process(self) -> bool:
        """Whether all ranks of each group are devices of one process; False if unknown."""
        return self.ranks_per_process == self.num_ranks

    @property
    def nodes_in_one_process(self) -> bool:
        """Whether the ranks of each node are devices of one process; False if unknown."""
        return self.ranks_per_process is not None and self.ranks_per_process % self.ranks_per_node == 0

    @property
    def crosses_slices(self) -> bool:
        """Whether the ranks are devices of several TPU slices."""
        sizes = zip(self.expert_axes, self.levels, strict=False)
        return any(level.size > 1 for axis, level in sizes if axis in self.slice_axes)

    @property
    def num_domains(self) -> int:
        """Number of domains in the group, `R / M`."""
        return self.num_ranks // self.ranks_per_domain

    def inside(self, num_ranks: int) -> "Topology":
        """Return the topology of blocks of consecutive ranks; this one if no innermost mesh axes have their number.

        Args:
            num_ranks: ranks of a block, such as `ranks_per_domain`.

        Returns:
            The topology of a block, whose expert axes are the innermost ones. The outer ones become data axes.
        """
        inner = (self.levels[first:] for first in range(1, len(self.expert_axes)))
        levels = next((few for few in inner if math.prod(level.size for level in few) == num_ranks), None)
        if levels is None:
            return self
        return replace(
            self,
            levels=levels,
            ranks_per_domain=math.gcd(self.ranks_per_domain, num_ranks),
            expert_axes=self.expert_axes[-len(levels) :],
            data_axes=self.data_axes + self.expert_axes[: -len(levels)],
            ranks_per_process=self.ranks_per_process and math.gcd(self.ranks_per_process, num_ranks),
        )

    @classmethod
    def flat(cls, num_ranks: int, ranks_per_domain: int | None = None) -> "Topology":
        """Return a group of one level without mesh axes, sufficient for planning.

        Args:
            num_ranks: `R`.
            ranks_per_domain: `M`; `None` (default) makes all ranks one domain.

        Returns:
            The topology.

        Raises:
            ValueError: `num_ranks` is below 1, or `ranks_per_domain` does not divide it.

        Examples:
            >>> from jax_moe_lb import Topology
            >>> Topology.flat(16, ranks_per_domain=8).num_domains
            2
        """
        check_value("num_ranks", num_ranks, Count)
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
        """Return the topology of a mesh, for `nn.MoE` or `moe`; warn of TPU chips that are no box of a torus.

        Args:
            mesh: device mesh or abstract mesh.
            expert_axis: one to three axes of the group, outermost first. They become the innermost of the levels dc,
                node and gpu.
            data_axes: axes sharding tokens besides the group, such as `("data", "fsdp")`; the layer is replicated over
                all others. `None` (default) takes all axes except those of the group and `tensor_axes`.
            tensor_axes: axes sharding the inner width of every expert; their ranks hold the same tokens. Usually empty
                (default), because more ranks in the group give larger matrix products.
            ranks_per_domain: `M`; `None` (default) takes the size of the innermost axis.
            rails_per_node: `N`, network interfaces of a node; 1 (default). Only `RailS` and `MultiRailDispatch` use
                more.
            bytes_per_s: one-way rate of a rank along each axis, in bytes per second, in the order of `expert_axis`.
            latency_s: one-way latency along each axis, in seconds, in the order of `expert_axis`.
            flops_per_s: floating-point operations per second of one rank.

        Returns:
            The topology, with `processes` and `ranks_per_process` set for a mesh of devices.

        Raises:
            ValueError: an axis is not in the mesh or repeated, there are more than three expert axes, or the number of
                rates differs from the number of expert axes.

        Examples:
            >>> from jax.sharding import AbstractMesh
            >>> from jax_moe_lb import Topology
            >>> topology = Topology.from_mesh(AbstractMesh((2, 4, 8), ("data", "node", "expert")), ("node", "expert"))
            >>> topology.num_ranks, topology.ranks_per_domain, topology.data_axes
            (32, 8, ('data',))
        """
        check_value("mesh", mesh, Mesh | AbstractMesh)
        axes, tensor = _axes_named("expert_axis", expert_axis), _axes_named("tensor_axes", tensor_axes)
        if not 1 <= len(set(axes)) == len(axes) <= len(LEVEL_NAMES):
            raise ValueError(f"expert_axis is {expert_axis!r}; expected one to three distinct mesh axes")
        others = tuple(axis for axis in mesh.axis_names if axis not in axes + tensor)
        data = others if data_axes is None else _axes_named("data_axes", data_axes)
        for axis in axes:
            if axis not in mesh.axis_names:
                raise ValueError(f"expert_axis names {axis!r}; expected an axis of the mesh, one of {mesh.axis_names}")
        beside = tuple(axis for axis in mesh.axis_names if axis not in axes)
        for name, value, given, known in (("data", data_axes, data, others), ("tensor", tensor_axes, tensor, beside)):
            if len(set(given)) < len(given) or not set(given) <= set(known):
                raise ValueError(f"{name}_axes is {value!r}; expected distinct axes of {known}, excluding expert_axis")
        _warn_of_torus(mesh, axes)
        rates = _per_axis("bytes_per_s", bytes_per_s, axes)
        latencies = _per_axis("latency_s", latency_s, axes)
        # The innermost axis is the fastest level, so the one axis of a flat mesh is the gpu level.
        names = LEVEL_NAMES[-len(axes) :]
        levels = tuple(map(Level, names, (mesh.shape[axis] for axis in axes), rates, latencies))
        return cls(
            levels=levels,
            ranks_per_domain=levels[-1].size if ranks_per_domain is None else ranks_per_domain,
            rails_per_node=rails_per_node,
            expert_axes=axes,
            data_axes=data,
            tensor_axes=tensor,
            flops_per_s=flops_per_s,
            **process_layout(mesh, axes),
            **_of_devices(mesh.devices, mesh.axis_names, axes) if isinstance(mesh, Mesh) else {},
        )


def process_layout(mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> dict[str, Any]:
    """Return `ranks_per_process` and `processes` of the groups along mesh axes; unknown without devices."""
    if not isinstance(mesh, Mesh):
        return {"ranks_per_process": None, "processes": ()}
    groups = mesh.devices, mesh.axis_names, axes
    return {"ranks_per_process": _ranks_per_process(*groups), "processes": _own_processes(*groups)}


def _of_devices(devices: np.ndarray, names: tuple[str, ...], axes: tuple[str, ...]) -> dict[str, Any]:
    return {
        "platform": _platform(devices),
        "device_kind": None if devices.flat[0].platform == "cpu" else devices.flat[0].device_kind,
        "limited_routing": has_limited_routing(devices.flat[0]),
        "slice_axes": slice_axes(devices, names, axes),
    }


def _platform(devices: np.ndarray) -> str:
    # JAX names the backend of a present GPU, and the lowering platform of a device to compile for.
    device = devices.flat[0]
    if device.platform != "gpu":
        return device.platform
    version = getattr(getattr(device, "client", None), "platform_version", "")
    return "rocm" if "rocm" in version.lower() else "cuda"


def _ranks_per_process(devices: np.ndarray, names: tuple[str, ...], axes: tuple[str, ...]) -> int:
    """Return the largest divisor of `R` whose blocks of consecutive ranks each belong to one process."""
    groups = _processes_by_group(devices, names, axes)
    ranks = groups.shape[1]
    for size in (size for size in range(ranks, 1, -1) if ranks % size == 0):
        blocks = groups.reshape(-1, size)
        if (blocks == blocks[:, :1]).all():
            return size
    return 1


def _own_processes(devices: np.ndarray, names: tuple[str, ...], axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return the process of each rank, group by group, if several processes own one device each; else `()`."""
    processes = tuple(_processes_by_group(devices, names, axes).flatten().tolist())
    return processes if 1 < len(processes) == len(set(processes)) else ()


def _processes_by_group(devices: np.ndarray, names: tuple[str, ...], axes: tuple[str, ...]) -> np.ndarray:
    process = np.vectorize(lambda device: device.process_index, otypes=[int])(devices)
    order = [names.index(axis) for axis in axes]
    ranks = math.prod(process.shape[axis] for axis in order)
    return np.moveaxis(process, order, range(-len(order), 0)).reshape(-1, ranks)


def _axes_named(name: str, axes: str | tuple[str, ...]) -> tuple[str, ...]:
    axes = (axes,) if isinstance(axes, str) else axes
    if not isinstance(axes, tuple | list) or not all(isinstance(axis, str) for axis in axes):
        raise TypeError(f"{name} is {shown(axes)}; expected names of mesh axes")
    return tuple(axes)


def _per_axis(name: str, values: tuple[float, ...] | None, axes: tuple[str, ...]) -> tuple[float | None, ...]:
    if values is None:
        return (None,) * len(axes)
    if not isinstance(values, tuple | list) or len(values) != len(axes):
        raise ValueError(f"{name} is {shown(values)}; expected one number per expert axis {axes}")
    return tuple(values)


def _warn_of_torus(mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> None:
    """Warn if the first group of a mesh is no line, plane or box of a torus."""
    if not isinstance(mesh, Mesh):
        return
    index = tuple(slice(None) if axis in axes else 0 for axis in mesh.axis_names)
    if message := torus_warning(list(mesh.devices[index].flat), axes):
        # At the caller of `from_mesh`.
        warnings.warn(message, stacklevel=3)
