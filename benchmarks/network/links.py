"""Namespaces, interfaces and routes, by `ip`; what they carried, by their counters."""

import json
import subprocess
from dataclasses import dataclass


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
    # Else a connection that paused starts slowly again, and times depend on what came before.
    for setting in ("net.ipv4.tcp_slow_start_after_idle=0", *settings):
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
    """Makes an interface a port of a bridge of its namespace."""
    ip(port.namespace, f"link set {port.device} master {bridge}")


def add_address(at: Interface, address: str) -> None:
    """`10.0.0.1/24`, for example."""
    ip(at.namespace, f"address add {address} dev {at.device}")


def counters(at: Interface) -> Counters:
    """Of an interface, since it was made."""
    (link,) = json.loads(run("ip", "-n", at.namespace, "-s", "-j", "link", "show", "dev", at.device))
    return Counters(link["stats64"]["tx"]["bytes"], link["stats64"]["rx"]["bytes"])
