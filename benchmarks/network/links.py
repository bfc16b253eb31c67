"""Namespaces, interfaces and routes, configured with `ip`, and their byte counters."""

import ipaddress
import json
import subprocess
from dataclasses import dataclass

STEADY = (
    # Keep the congestion window of an idle connection.
    "net.ipv4.tcp_slow_start_after_idle=0",
    # Queues are long and lossless, so late packets must not be retransmitted early.
    "net.ipv4.tcp_early_retrans=0",
)
"""Settings of every namespace, to make times and bytes independent of earlier traffic."""

LATE = "rto_min 5s"
"""Retransmission timeout of every route, for the same reason."""


@dataclass(frozen=True)
class Interface:
    namespace: str
    device: str


@dataclass(frozen=True)
class Counters:
    """Bytes carried by an interface, including packet headers.

    With segmentation offload a large packet counts once, so the counters equal the payload to within half a percent.
    """

    sent_bytes: int
    received_bytes: int


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(words)}`: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def ip(namespace: str, command: str) -> str:
    return run("ip", "-n", namespace, *command.split())


def add_namespace(name: str, *settings: str) -> None:
    """Create a namespace with its loopback up."""
    run("ip", "netns", "add", name)
    ip(name, "link set lo up")
    for setting in (*STEADY, *settings):
        key, value = setting.split("=")
        run("ip", "netns", "exec", name, "sh", "-c", f"echo {value} > /proc/sys/{key.replace('.', '/')}")


def remove_namespace(name: str) -> None:
    """Delete a namespace with its interfaces."""
    run("ip", "netns", "del", name)


def connect(one: Interface, other: Interface) -> None:
    """Connect two interfaces: a veth pair, both up, without addresses."""
    run(
        *f"ip link add {one.device} netns {one.namespace} type veth".split(),
        *f"peer name {other.device} netns {other.namespace}".split(),
    )
    for end in (one, other):
        ip(end.namespace, f"link set {end.device} up")


def add_bridge(at: Interface) -> None:
    ip(at.namespace, f"link add {at.device} type bridge forward_delay 0")
    ip(at.namespace, f"link set {at.device} up")


def plug(port: Interface, bridge: str) -> None:
    ip(port.namespace, f"link set {port.device} master {bridge}")


def add_address(at: Interface, address: str) -> None:
    """Add an address such as `10.0.0.1/24`, with the route to its subnet if it has more than one address."""
    ip(at.namespace, f"address add {address} dev {at.device} noprefixroute")
    subnet = ipaddress.ip_interface(address).network
    if subnet.num_addresses > 1:
        add_route(at.namespace, str(subnet), f"dev {at.device} src {address.split('/')[0]}")


def add_route(namespace: str, subnet: str, way: str) -> None:
    """Add a route to a subnet such as `10.99.0.1/32`, for example `via 10.0.0.2`."""
    ip(namespace, f"route add {subnet} {LATE} {way}")


def counters(at: Interface) -> Counters:
    """Return the counters of an interface since its creation."""
    (link,) = json.loads(run("ip", "-n", at.namespace, "-s", "-j", "link", "show", "dev", at.device))
    return Counters(link["stats64"]["tx"]["bytes"], link["stats64"]["rx"]["bytes"])
