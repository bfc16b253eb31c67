"""Namespaces, interfaces and routes, by `ip`; what they carried, by their counters."""

import ipaddress
import json
import subprocess
from dataclasses import dataclass

STEADY = (
    # A connection that paused starts as fast as it ended.
    "net.ipv4.tcp_slow_start_after_idle=0",
    # Queues are long and lose nothing: what is late is on its way, and not to be sent again.
    "net.ipv4.tcp_early_retrans=0",
)
"""Of every namespace, so that times and bytes do not depend on what came before."""

LATE = "rto_min 5s"
"""Of every route, for the same reason."""


@dataclass(frozen=True)
class Interface:
    """A device of a namespace."""

    namespace: str
    device: str


@dataclass(frozen=True)
class Counters:
    """Bytes that passed an interface, with the headers of their packets.

    A packet that the interface may cut later (segmentation offload) counts as one: so these are, to half a percent,
    the bytes that programs sent.
    """

    sent_bytes: int
    received_bytes: int


def run(*words: str) -> str:
    """What a command prints.

    Raises:
        RuntimeError: it failed; with the command and what it said.
    """
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(words)}`: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def ip(namespace: str, command: str) -> str:
    """`ip` in a namespace."""
    return run("ip", "-n", namespace, *command.split())


def add_namespace(name: str, *settings: str) -> None:
    """A namespace with its loopback up.

    Args:
        name: of the namespace.
        settings: of the kernel, as `net.ipv4.ip_forward=1`.
    """
    run("ip", "netns", "add", name)
    ip(name, "link set lo up")
    for setting in (*STEADY, *settings):
        key, value = setting.split("=")
        run("ip", "netns", "exec", name, "sh", "-c", f"echo {value} > /proc/sys/{key.replace('.', '/')}")


def remove_namespace(name: str) -> None:
    """With its interfaces."""
    run("ip", "netns", "del", name)


def connect(one: Interface, other: Interface) -> None:
    """A wire: a pair of interfaces, both up, without addresses."""
    run(
        *f"ip link add {one.device} netns {one.namespace} type veth".split(),
        *f"peer name {other.device} netns {other.namespace}".split(),
    )
    for end in (one, other):
        ip(end.namespace, f"link set {end.device} up")


def add_bridge(at: Interface) -> None:
    """A switch."""
    ip(at.namespace, f"link add {at.device} type bridge forward_delay 0")
    ip(at.namespace, f"link set {at.device} up")


def plug(port: Interface, bridge: str) -> None:
    """Make an interface a port of a bridge of its namespace."""
    ip(port.namespace, f"link set {port.device} master {bridge}")


def add_address(at: Interface, address: str) -> None:
    """`10.0.0.1/24`, for example; with the route to its subnet, if that is more than this address."""
    ip(at.namespace, f"address add {address} dev {at.device} noprefixroute")
    subnet = ipaddress.ip_interface(address).network
    if subnet.num_addresses > 1:
        add_route(at.namespace, str(subnet), f"dev {at.device} src {address.split('/')[0]}")


def add_route(namespace: str, subnet: str, way: str) -> None:
    """To `10.99.0.1/32`, for example, the way `via 10.0.0.2`."""
    ip(namespace, f"route add {subnet} {LATE} {way}")


def counters(at: Interface) -> Counters:
    """Of an interface, since it was made."""
    (link,) = json.loads(run("ip", "-n", at.namespace, "-s", "-j", "link", "show", "dev", at.device))
    return Counters(link["stats64"]["tx"]["bytes"], link["stats64"]["rx"]["bytes"])
