"""Links of a rail fabric, and the paths of a flow between two GPUs."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from jax_moe_lb.core.topology import Topology

Gpus = Int[np.ndarray, "F"]
Paths = Int[np.ndarray, "F P C"]
"""Links of each path of a flow: `P` paths of `C` links; absent links are `Fabric.no_link`."""

PathsOf = Callable[["Fabric", Gpus, Gpus], Paths]


@dataclass(frozen=True)
class Fabric:
    """Nodes of GPUs with one NIC each, one leaf switch per rail, and spine switches between the leaves.

    NIC `n` of every node connects to leaf `n`. Directed links are numbered in this order: out of and into each GPU
    inside its node; out of and into each NIC; from leaves up to spines; from spines down to leaves; an unlimited
    placeholder. GPU `n` of node `d` and its NIC have index `d * gpus_per_node + n`; the link between them
    is unlimited.

    The model has no latency, headers, buffers and overflow, pauses, PCIe, switch capacity limits, or limits inside a
    node other than GPU ports.
    """

    num_nodes: int
    gpus_per_node: int
    nic_bytes_per_s: float
    gpu_bytes_per_s: float
    num_spines: int
    spine_bytes_per_s: float

    @classmethod
    def non_blocking(
        cls, num_nodes: int, gpus_per_node: int, nic_bytes_per_s: float, gpu_bytes_per_s: float
    ) -> "Fabric":
        """Return a fabric with as many uplinks as downlinks per leaf: one NIC-rate link to each spine."""
        rates = nic_bytes_per_s, gpu_bytes_per_s
        return cls(num_nodes, gpus_per_node, *rates, num_spines=num_nodes, spine_bytes_per_s=nic_bytes_per_s)

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node

    @property
    def topology(self) -> Topology:
        return replace(Topology.flat(self.num_gpus, self.gpus_per_node), rails_per_node=self.gpus_per_node)

    @property
    def first_links(self) -> range:
        """Indices of the first links into GPUs, out of NICs, into NICs, and from leaves up to spines."""
        return range(self.num_gpus, 5 * self.num_gpus, self.num_gpus)

    @property
    def no_link(self) -> int:
        """Index of the unlimited placeholder link."""
        return 4 * self.num_gpus + 2 * self.gpus_per_node * self.num_spines

    def bytes_per_s(self) -> Float[np.ndarray, "links"]:
        """Return the rate of every link, in bytes per second."""
        # In index order: GPUs out and in, NICs out and in, up and down, placeholder.
        counts = 2 * self.num_gpus, 2 * self.num_gpus, 2 * self.gpus_per_node * self.num_spines, 1
        return np.repeat([self.gpu_bytes_per_s, self.nic_bytes_per_s, self.spine_bytes_per_s, math.inf], counts)

    def marks(self) -> Bool[np.ndarray, "links"]:
        """Return a mask of links leaving a switch, which mark traffic when they are full."""
        # Indices from the links into NICs on; links out of GPUs and NICs do not leave a switch.
        marks = np.arange(self.no_link + 1) >= 3 * self.num_gpus
        marks[self.no_link] = False
        return marks


def rail_paths(fabric: Fabric, source: Gpus, target: Gpus) -> Paths:
    """Return one path per rail: to the rail rank of the sender's node, along the rail, and to the receiver in its node.

    Hops inside nodes are omitted if source or target is at the rail. A rail rank adds no delay: all links of the path
    carry the bytes at one rate. Inside a node all paths equal the direct path without a NIC.
    """
    gpus = fabric.gpus_per_node
    source, target = source[:, None], target[:, None]
    rail, (gpu_in, nic_out, nic_in, _) = np.arange(gpus), fabric.first_links
    first, last = source // gpus * gpus + rail, target // gpus * gpus + rail
    to_rail, from_rail = first != source, last != target
    far = source // gpus != target // gpus
    links = [
        np.where(~far | to_rail, source, fabric.no_link),
        np.where(far & to_rail, gpu_in + first, fabric.no_link),
        np.where(far, nic_out + first, fabric.no_link),
        np.where(far, nic_in + last, fabric.no_link),
        np.where(far & from_rail, last, fabric.no_link),
        np.where(~far | from_rail, gpu_in + target, fabric.no_link),
    ]
    return np.stack(np.broadcast_arrays(*links), -1).astype(np.intp)


def spine_paths(fabric: Fabric, source: Gpus, target: Gpus) -> Paths:
    """Return one path per spine, from the sender's own NIC to the receiver's own NIC.

    NICs of one rail share a leaf, so their paths use no spine. Inside a node no path uses a NIC.
    """
    gpus = fabric.gpus_per_node
    source, target = source[:, None], target[:, None]
    spine, (gpu_in, nic_out, nic_in, up) = np.arange(fabric.num_spines), fabric.first_links
    far = source // gpus != target // gpus
    climbs = far & (source % gpus != target % gpus)
    links = [
        np.where(far, nic_out + source, source),
        np.where(climbs, up + source % gpus * fabric.num_spines + spine, fabric.no_link),
        np.where(climbs, up + (gpus + target % gpus) * fabric.num_spines + spine, fabric.no_link),
        np.where(far, nic_in + target, gpu_in + target),
    ]
    return np.stack(np.broadcast_arrays(*links), -1).astype(np.intp)
