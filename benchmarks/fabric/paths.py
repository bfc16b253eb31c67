"""The links of a fabric with rails, and the paths that a flow from one GPU to another may take over them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from jax_moe_lb.core.topology import Topology

Gpus = Int[np.ndarray, "F"]
Paths = Int[np.ndarray, "F P C"]
"""The links of each path that a flow may take: `P` paths of `C` links; what is missing is `Fabric.no_link`."""

PathsOf = Callable[["Fabric", Gpus, Gpus], Paths]


@dataclass(frozen=True)
class Fabric:
    """Nodes of GPUs with a NIC each, a leaf switch for each rail, and spine switches between the leaves.

    NIC `n` of every node is cabled to leaf `n`. A link of one direction has a number; they stand in this order: out of
    and into each GPU on the network inside its node, out of and into each NIC, from each leaf up to each spine, from
    each spine down to each leaf, and one without limit that stands for none. GPU `n` of node `d` and its NIC are number
    `d * gpus_per_node + n`; between the two there is no limit.

    It leaves out latency, headers, buffers and their overflow, pauses, PCIe, the switches' own limits, and the limit of
    a switch inside a node other than its ports.

    Args:
        num_nodes: how many nodes there are, which the paper calls domains: its `M`.
        gpus_per_node: how many GPUs a node has, and how many NICs, rails and leaves there are: the paper's `N`.
        nic_bytes_per_s: what a NIC carries in one direction, in bytes per second: `R2`; 50e9 for 400 Gbit/s.
        gpu_bytes_per_s: what a GPU's port inside its node carries in one direction, in bytes per second: `R1`; 450e9
            for NVLink 4.
        num_spines: how many spine switches there are, each with one link from and to each leaf.
        spine_bytes_per_s: what such a link carries in one direction, in bytes per second.
    """

    num_nodes: int
    gpus_per_node: int
    nic_bytes_per_s: float
    gpu_bytes_per_s: float
    num_spines: int
    spine_bytes_per_s: float

    def __post_init__(self) -> None:
        for name in ("num_nodes", "gpus_per_node", "num_spines"):
            if getattr(self, name) < 1:
                raise ValueError(f"Fabric.{name} is {getattr(self, name)}; expected at least 1")
        for name in ("nic_bytes_per_s", "gpu_bytes_per_s", "spine_bytes_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"Fabric.{name} is {getattr(self, name)}; expected a finite rate above 0, in bytes/s")

    @classmethod
    def non_blocking(
        cls, num_nodes: int, gpus_per_node: int, nic_bytes_per_s: float, gpu_bytes_per_s: float
    ) -> "Fabric":
        """Make a fabric whose leaves have as many links up as down, one to each of as many spines as nodes, all as
        fast as a NIC.

        Args:
            num_nodes: how many nodes there are.
            gpus_per_node: how many GPUs a node has.
            nic_bytes_per_s: what a NIC carries in one direction, in bytes per second.
            gpu_bytes_per_s: what a GPU's port inside its node carries in one direction, in bytes per second.
        """
        rates = nic_bytes_per_s, gpu_bytes_per_s
        return cls(num_nodes, gpus_per_node, *rates, num_spines=num_nodes, spine_bytes_per_s=nic_bytes_per_s)

    @property
    def num_gpus(self) -> int:
        """`R`, the GPUs of all nodes."""
        return self.num_nodes * self.gpus_per_node

    @property
    def topology(self) -> Topology:
        """What balancers need to know of it."""
        return replace(Topology.flat(self.num_gpus, self.gpus_per_node), rails_per_node=self.gpus_per_node)

    @property
    def no_link(self) -> int:
        """The number of the link without limit."""
        return 4 * self.num_gpus + 2 * self.gpus_per_node * self.num_spines

    def bytes_per_s(self) -> Float[np.ndarray, "links"]:
        """Return the rate of every link, in bytes per second."""
        # In the order of the numbers: GPUs out and in, NICs out and in, up and down, none.
        counts = 2 * self.num_gpus, 2 * self.num_gpus, 2 * self.gpus_per_node * self.num_spines, 1
        return np.repeat([self.gpu_bytes_per_s, self.nic_bytes_per_s, self.spine_bytes_per_s, math.inf], counts)

    def marks(self) -> Bool[np.ndarray, "links"]:
        """Says which links leave a switch by an outgoing port, which marks what passes it when it is full."""
        # From the links into NICs on: those out of GPUs and NICs leave no switch.
        marks = np.arange(self.no_link + 1) >= 3 * self.num_gpus
        marks[self.no_link] = False
        return marks

    def gpu_out(self, gpu: np.ndarray) -> np.ndarray:
        """Return the links from GPUs to the others of their nodes."""
        return gpu

    def gpu_in(self, gpu: np.ndarray) -> np.ndarray:
        """Return the links to GPUs from the others of their nodes."""
        return self.num_gpus + gpu

    def nic_out(self, gpu: np.ndarray) -> np.ndarray:
        """Return the links from GPUs' NICs to their leaves."""
        return 2 * self.num_gpus + gpu

    def nic_in(self, gpu: np.ndarray) -> np.ndarray:
        """Return the links from leaves to GPUs' NICs."""
        return 3 * self.num_gpus + gpu

    def spine_up(self, leaf: np.ndarray, spine: np.ndarray) -> np.ndarray:
        """Return the links from leaves to spines."""
        return 4 * self.num_gpus + leaf * self.num_spines + spine

    def spine_down(self, spine: np.ndarray, leaf: np.ndarray) -> np.ndarray:
        """Return the links from spines to leaves."""
        return 4 * self.num_gpus + (self.gpus_per_node + leaf) * self.num_spines + spine


def rail_paths(fabric: Fabric, source: Gpus, target: Gpus) -> Paths:
    """Return one path for each rail: to the GPU of the sender's node at the rail, along it, and on in the receiver's
    node.

    The hops inside nodes are left out where source or target is at the rail. Bytes do not wait at a rail rank: all
    links of the path carry them at one rate. Inside a node all paths are the one that uses no NIC.

    Args:
        fabric: whose links the paths use.
        source: the GPU that sends each flow.
        target: the GPU that receives it.
    """
    gpus = fabric.gpus_per_node
    source, target = source[:, None], target[:, None]
    rail = np.arange(gpus)
    first, last = source // gpus * gpus + rail, target // gpus * gpus + rail
    to_rail, from_rail = first != source, last != target
    far = source // gpus != target // gpus
    links = [
        np.where(~far | to_rail, fabric.gpu_out(source), fabric.no_link),
        np.where(far & to_rail, fabric.gpu_in(first), fabric.no_link),
        np.where(far, fabric.nic_out(first), fabric.no_link),
        np.where(far, fabric.nic_in(last), fabric.no_link),
        np.where(far & from_rail, fabric.gpu_out(last), fabric.no_link),
        np.where(~far | from_rail, fabric.gpu_in(target), fabric.no_link),
    ]
    return _stacked(fabric, links, source, target)


def spine_paths(fabric: Fabric, source: Gpus, target: Gpus) -> Paths:
    """Return one path for each spine: from the sender's own NIC to the receiver's own.

    NICs of one rail have a leaf in common, and all paths between them are the one without a spine. Inside a node no
    path uses a NIC.

    Args:
        fabric: whose links the paths use.
        source: the GPU that sends each flow.
        target: the GPU that receives it.
    """
    gpus = fabric.gpus_per_node
    source, target = source[:, None], target[:, None]
    spine = np.arange(fabric.num_spines)
    far = source // gpus != target // gpus
    climbs = far & (source % gpus != target % gpus)
    links = [
        np.where(far, fabric.nic_out(source), fabric.gpu_out(source)),
        np.where(climbs, fabric.spine_up(source % gpus, spine), fabric.no_link),
        np.where(climbs, fabric.spine_down(spine, target % gpus), fabric.no_link),
        np.where(far, fabric.nic_in(target), fabric.gpu_in(target)),
    ]
    return _stacked(fabric, links, source, target)


def _stacked(fabric: Fabric, links: list[np.ndarray], source: np.ndarray, target: np.ndarray) -> Paths:
    """Stack the links of paths, and refuses a flow from a GPU to itself, which has no path."""
    if (source == target).any():
        gpu = int(source[source == target][0])
        raise ValueError(f"a flow goes from GPU {gpu} to itself; expected another target")
    return np.stack(np.broadcast_arrays(*links), -1).astype(np.intp)
