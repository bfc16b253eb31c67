"""Test networks: two datacenters, nodes with rails, nodes with several paths."""

from dataclasses import dataclass

from benchmarks.network.links import Interface, add_address, add_bridge, add_namespace, add_route, connect, plug
from benchmarks.network.network import Host, Network
from benchmarks.network.shaping import check_rate

ROUTER = ("net.ipv4.ip_forward=1", "net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.default.rp_filter=0")
"""Settings of a router, which also accepts packets on an interface other than the return route's."""

MOST = 250
"""Maximum number of members per address range."""


@dataclass(frozen=True)
class TwoDatacenters:
    """Two switches with a process on every port, and one shared link between the switches.

    Ranks are numbered by datacenter. The network's `nics` are the ends of that link: the bytes sent by datacenter 0,
    then by datacenter 1.
    """

    processes_per_dc: int
    wan_bits_per_s: float | None

    def __post_init__(self) -> None:
        _check_count("TwoDatacenters.processes_per_dc", self.processes_per_dc)
        check_rate("TwoDatacenters.wan_bits_per_s", self.wan_bits_per_s)

    def build(self) -> Network:
        wan = tuple(Interface(f"dc{dc}", "wan") for dc in range(2))
        hosts = tuple(
            Host(f"dc{dc}p{process}", f"10.77.{dc}.{process + 1}")
            for dc in range(2)
            for process in range(self.processes_per_dc)
        )
        for end in wan:
            add_namespace(end.namespace)
            add_bridge(Interface(end.namespace, "switch"))
        connect(*wan)
        for end in wan:
            plug(end, "switch")
        for host in hosts:
            add_namespace(host.namespace)
            _attach(Interface(host.namespace, "eth0"), Interface(host.namespace[:3], host.namespace), "switch")
            add_address(Interface(host.namespace, "eth0"), f"{host.address}/16")
        network = Network(hosts, wan, wan, tuple(end.namespace for end in wan) + tuple(h.namespace for h in hosts))
        network.set_rate(self.wan_bits_per_s)
        return network


@dataclass(frozen=True)
class Rails:
    """Nodes of several ranks, each rank with its own network interface.

    A rank has one address for all routes, a loopback address. Inside a node packets pass an unlimited switch. Ranks are
    numbered by node; the network's `nics` are their interfaces.
    """

    nodes: int
    per_node: int
    nic_bits_per_s: float | None
    rail_only: bool = False

    def __post_init__(self) -> None:
        _check_count("Rails.nodes", self.nodes)
        _check_count("Rails.per_node", self.per_node)
        check_rate("Rails.nic_bits_per_s", self.nic_bits_per_s)

    def build(self) -> Network:
        ranks = [(node, rail) for node in range(self.nodes) for rail in range(self.per_node)]
        hosts = tuple(Host(f"n{node}r{rail}", self._address(node, rail)) for node, rail in ranks)
        switches = [f"node{node}" for node in range(self.nodes)]
        for switch in switches:
            add_namespace(switch)
            add_bridge(Interface(switch, "switch"))
        for (node, rail), host in zip(ranks, hosts, strict=True):
            add_namespace(host.namespace, *ROUTER)
            add_address(Interface(host.namespace, "lo"), f"{host.address}/32")
            _attach(Interface(host.namespace, "eth0"), Interface(f"node{node}", host.namespace), "switch")
            add_address(Interface(host.namespace, "eth0"), f"10.77.{node}.{rail + 1}/24")
        outside, far_ends = self._join_rails(ranks) if self.rail_only else self._join_by_spine(ranks)
        for node, rail in ranks:
            for other in ranks:
                if other != (node, rail):
                    self._add_route((node, rail), other)
        nics = tuple(Interface(host.namespace, "nic0") for host in hosts)
        names = (*switches, *outside, *(host.namespace for host in hosts))
        network = Network(hosts, nics, (*nics, *far_ends), names)
        network.set_rate(self.nic_bits_per_s)
        return network

    def _address(self, node: int, rail: int) -> str:
        return f"10.99.{node}.{rail + 1}"

    def _join_rails(self, ranks: list[tuple[int, int]]) -> tuple[list[str], list[Interface]]:
        """Create a switch for every rail."""
        names, far_ends = [f"rail{rail}" for rail in range(self.per_node)], []
        for name in names:
            add_namespace(name)
            add_bridge(Interface(name, "switch"))
        for node, rail in ranks:
            far_ends.append(Interface(f"rail{rail}", f"n{node}"))
            _attach(Interface(f"n{node}r{rail}", "nic0"), far_ends[-1], "switch")
            add_address(Interface(f"n{node}r{rail}", "nic0"), f"10.88.{rail}.{node + 1}/24")
        return names, far_ends

    def _join_by_spine(self, ranks: list[tuple[int, int]]) -> tuple[list[str], list[Interface]]:
        """Create a router with a link to every rank, rate-limited in both directions."""
        add_namespace("spine", *ROUTER)
        far_ends = []
        for node, rail in ranks:
            near, far = Interface(f"n{node}r{rail}", "nic0"), Interface("spine", f"n{node}r{rail}")
            connect(near, far)
            wire = 4 * (node * self.per_node + rail)
            subnet = f"10.88.{wire // 256}."
            add_address(near, f"{subnet}{wire % 256 + 1}/30")
            add_address(far, f"{subnet}{wire % 256 + 2}/30")
            near_end = f"via {subnet}{wire % 256 + 1} dev {far.device}"
            add_route("spine", f"{self._address(node, rail)}/32", near_end)
            far_ends.append(far)
        return ["spine"], far_ends

    def _add_route(self, rank: tuple[int, int], to: tuple[int, int]) -> None:
        (node, rail), (other_node, other_rail) = rank, to
        if node == other_node:
            way = f"via 10.77.{node}.{other_rail + 1} dev eth0"
        elif not self.rail_only:
            wire = 4 * (node * self.per_node + rail)
            way = f"via 10.88.{wire // 256}.{wire % 256 + 2} dev nic0"
        elif rail == other_rail:
            way = f"via 10.88.{rail}.{other_node + 1} dev nic0"
        else:
            way = f"via 10.77.{node}.{other_rail + 1} dev eth0"
        add_route(f"n{node}r{rail}", f"{self._address(*to)}/32", f"{way} src {self._address(*rank)}")


@dataclass(frozen=True)
class Multipath:
    """Nodes with several interfaces, over which the kernel distributes connections by a hash (ECMP).

    A node is one namespace with one address per rank; interface `j` of all nodes is on one switch. Ranks are numbered
    by node; the network's `nics` are the nodes' interfaces, by node. A rank must bind its connections to its address;
    otherwise they use another one.
    """

    nodes: int
    per_node: int
    nics_per_node: int
    nic_bits_per_s: float | None

    def __post_init__(self) -> None:
        for name in ("nodes", "per_node", "nics_per_node"):
            _check_count(f"Multipath.{name}", getattr(self, name))
        check_rate("Multipath.nic_bits_per_s", self.nic_bits_per_s)

    def build(self) -> Network:
        nodes, planes = [f"node{node}" for node in range(self.nodes)], range(self.nics_per_node)
        for plane in planes:
            add_namespace(f"plane{plane}")
            add_bridge(Interface(f"plane{plane}", "switch"))
        hosts, nics, far_ends = [], [], []
        for node, name in enumerate(nodes):
            add_namespace(name, *ROUTER, "net.ipv4.fib_multipath_hash_policy=1")
            hosts += [Host(name, f"10.99.{node}.{rank + 1}") for rank in range(self.per_node)]
            for host in hosts[-self.per_node :]:
                add_address(Interface(name, "lo"), f"{host.address}/32")
            for plane in planes:
                nics.append(Interface(name, f"nic{plane}"))
                far_ends.append(Interface(f"plane{plane}", name))
                _attach(nics[-1], far_ends[-1], "switch")
                add_address(nics[-1], f"10.88.{plane}.{node + 1}/24")
        for node, name in enumerate(nodes):
            for other in set(range(self.nodes)) - {node}:
                hops = " ".join(f"nexthop via 10.88.{plane}.{other + 1} dev nic{plane}" for plane in planes)
                add_route(name, f"10.99.{other}.0/24", hops)
        names = (*nodes, *(f"plane{plane}" for plane in planes))
        network = Network(tuple(hosts), tuple(nics), (*nics, *far_ends), names)
        network.set_rate(self.nic_bits_per_s)
        return network


def _attach(end: Interface, port: Interface, bridge: str) -> None:
    """Connect `end` to a new port of a bridge."""
    connect(end, port)
    plug(port, bridge)


def _check_count(name: str, count: int) -> None:
    if not 1 <= count <= MOST:
        raise ValueError(f"{name} is {count}; expected from 1 to {MOST}")
