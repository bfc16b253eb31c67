"""A network that stands: where its ranks live, and which interfaces to watch and to throttle."""

from dataclasses import dataclass
from types import TracebackType

from benchmarks.network.links import Counters, Interface, counters, remove_namespace
from benchmarks.network.shaping import set_rate


@dataclass(frozen=True)
class Host:
    """Where a rank lives.

    Args:
        namespace: of its interfaces; ranks may share one.
        address: its own, without a prefix length.
    """

    namespace: str
    address: str


@dataclass(frozen=True)
class Network:
    """Namespaces and wires. As a context it removes them.

    Args:
        hosts: one per rank.
        nics: the interfaces whose traffic counts, in the order that their topology says.
        throttled: all interfaces with a rate.
        namespaces: all of them.
    """

    hosts: tuple[Host, ...]
    nics: tuple[Interface, ...]
    throttled: tuple[Interface, ...]
    namespaces: tuple[str, ...]

    def set_rate(self, bits_per_s: float | None) -> None:
        """Of all throttled interfaces; `None`: as fast as the machine can. Any process of the sandbox may call it."""
        for interface in self.throttled:
            set_rate(interface, bits_per_s)

    def counters(self) -> tuple[Counters, ...]:
        """Of the `nics`. Any process of the sandbox may call it."""
        return tuple(map(counters, self.nics))

    def __enter__(self) -> "Network":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self.namespaces:
            remove_namespace(name)
