"""Test networks: two datacenters, ranks on one switch, nodes with rails, nodes with several paths."""

from collections.abc import Sequence

from benchmarks.network.links import Interface, add_address, add_bridge, add_namespace, add_route, connect, plug
from benchmarks.network.network import Host, Network

ROUTER = ("net.ipv4.ip_forward=1", "net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.default.rp_filter=0")
"""Settings of a router, which also accepts packets on an interface other than the return route's."""


def two_datacenters(processes_per_dc: int, wan_bits_per_s: float | None = None) -> Network:
    """Return two switches with a process on every port, and one shared link between the switches.

    Ranks are numbered by datacenter. The network's `nics` are the ends of that link: the bytes sent by datacenter 0,
    then by datacenter 1.
    """
    wan = [Interface(f"dc{dc}", "wan") for dc in range(2)]
    ranks = [(dc, process) for dc in range(2) for process in range(processes_per_dc)]
    hosts = [Host(f"dc{dc}p{process}", f"10.77.{dc}.{process + 1}") for dc, process in ranks]
    for end in wan:
        _add_switch(end.namespace)
    connect(*wan)
    for end in wan:
        plug(end, "switch")
    for (dc, _), host in zip(ranks, hosts, strict=True):
        add_namespace(host.namespace)
        _attach(Interface(host.namespace, "eth0"), Interface(f"dc{dc}", host.namespace), f"{host.address}/16")
    return _limited(hosts, wan, wan, wan_bits_per_s)


def one_switch(num_ranks: int) -> Network:
    """Return ranks with one interface each, the network's `nics`, to a switch."""
    hosts = [Host(f"rank{rank}", f"10.88.0.{rank + 1}") for rank in range(num_ranks)]
    nics = [Interface(host.namespace, "nic0") for host in hosts]
    ports = [Interface("hub", host.namespace) for host in hosts]
    _add_switch("hub")
    for host, nic, port in zip(hosts, nics, ports, strict=True):
        add_namespace(host.namespace)
        _attach(nic, port, f"{host.address}/24")
    return _limited(hosts, nics, [*nics, *ports], None)


def rails(nodes: int, per_node: int, nic_bits_per_s: float | None) -> Network:
    """Return nodes of several ranks, each rank with its own network interface to a router, the spine.

    A rank has one address for all routes, a loopback address. Inside a node packets pass an unlimited switch. Ranks are
    numbered by node; the network's `nics` are their interfaces.
    """
    ranks = [(node, rail) for node in range(nodes) for rail in range(per_node)]
    hosts = [Host(f"n{node}r{rail}", f"10.99.{node}.{rail + 1}") for node, rail in ranks]
    nics = [Interface(host.namespace, "nic0") for host in hosts]
    ports = [Interface("spine", host.namespace) for host in hosts]
    add_namespace("spine", *ROUTER)
    for node in range(nodes):
        _add_switch(f"node{node}")
    for i, ((node, rail), host) in enumerate(zip(ranks, hosts, strict=True)):
        add_namespace(host.namespace, *ROUTER)
        add_address(Interface(host.namespace, "lo"), f"{host.address}/32")
        inside, switch_port = Interface(host.namespace, "eth0"), Interface(f"node{node}", host.namespace)
        _attach(inside, switch_port, f"10.77.{node}.{rail + 1}/24")
        connect(nics[i], ports[i])
        add_address(nics[i], f"10.88.{i}.1/30")
        add_address(ports[i], f"10.88.{i}.2/30")
        add_route("spine", f"{host.address}/32", f"via 10.88.{i}.1 dev {host.namespace}")
    _add_routes(hosts, per_node)
    return _limited(hosts, nics, [*nics, *ports], nic_bits_per_s)


def _add_routes(hosts: Sequence[Host], per_node: int) -> None:
    """Add the routes between the ranks of `rails`: over the switch of a node, or over the spine."""
    for i, host in enumerate(hosts):
        for j, other in enumerate(hosts):
            node, rail = divmod(j, per_node)
            way = f"10.77.{node}.{rail + 1} dev eth0" if i // per_node == node else f"10.88.{i}.2 dev nic0"
            if i != j:
                add_route(host.namespace, f"{other.address}/32", f"via {way} src {host.address}")


def multipath(nodes: int, per_node: int, nic_bits_per_s: float | None) -> Network:
    """Return nodes with an interface per rank, over which the kernel distributes connections by a hash (ECMP).

    A node is one namespace with one address per rank; interface `j` of all nodes is on one switch. Ranks are numbered
    by node; the network's `nics` are the nodes' interfaces, by node. A rank must bind its connections to its address;
    otherwise they use another one.
    """
    planes = range(per_node)
    hosts = [Host(f"node{node}", f"10.99.{node}.{rank + 1}") for node in range(nodes) for rank in planes]
    nics = [Interface(f"node{node}", f"nic{plane}") for node in range(nodes) for plane in planes]
    ports = [Interface(f"plane{plane}", f"node{node}") for node in range(nodes) for plane in planes]
    for plane in planes:
        _add_switch(f"plane{plane}")
    for node in range(nodes):
        add_namespace(f"node{node}", *ROUTER, "net.ipv4.fib_multipath_hash_policy=1")
    for host in hosts:
        add_address(Interface(host.namespace, "lo"), f"{host.address}/32")
    for i, (nic, port) in enumerate(zip(nics, ports, strict=True)):
        _attach(nic, port, f"10.88.{i % per_node}.{i // per_node + 1}/24")
    for node in range(nodes):
        for other in set(range(nodes)) - {node}:
            hops = " ".join(f"nexthop via 10.88.{plane}.{other + 1} dev nic{plane}" for plane in planes)
            add_route(f"node{node}", f"10.99.{other}.0/24", hops)
    return _limited(hosts, nics, [*nics, *ports], nic_bits_per_s)


def _add_switch(name: str) -> None:
    add_namespace(name)
    add_bridge(Interface(name, "switch"))


def _attach(end: Interface, port: Interface, address: str) -> None:
    """Connect `end`, which gets an address, to a new port of a switch."""
    connect(end, port)
    plug(port, "switch")
    add_address(end, address)


def _limited(
    hosts: Sequence[Host], nics: Sequence[Interface], throttled: Sequence[Interface], bits_per_s: float | None
) -> Network:
    """Return a network whose throttled interfaces have this rate."""
    network = Network(tuple(hosts), tuple(nics), tuple(throttled))
    network.set_rate(bits_per_s)
    return network
