"""A network with its hosts, monitored interfaces and rate-limited interfaces."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.network.links import Counters, Interface, counters, remove_namespace
from benchmarks.network.shaping import set_rate


@dataclass(frozen=True)
class Host:
    """Location of a rank."""

    namespace: str
    address: str


@dataclass(frozen=True)
class Network:
    """Hosts and links, and a context manager that removes all namespaces of the sandbox."""

    hosts: tuple[Host, ...]
    nics: tuple[Interface, ...]
    throttled: tuple[Interface, ...]

    def set_rate(self, bits_per_s: float | None) -> None:
        """Set the rate of all throttled interfaces from any process of the sandbox; `None` removes the limit."""
        for interface in self.throttled:
            set_rate(interface, bits_per_s)

    def counters(self) -> tuple[Counters, ...]:
        """Return the counters of the `nics`; any process of the sandbox may call it."""
        return tuple(map(counters, self.nics))

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *_: object) -> None:
        for path in sorted(Path("/run/netns").iterdir()):
            remove_namespace(path.name)
