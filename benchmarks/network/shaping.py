"""The rate of an interface: a token bucket that lets packets without data pass first.

With one queue for all, acknowledgements wait behind the bulk of the other direction and the link idles: 6 to 25 %
longer transfers than bytes over bandwidth, where this stays within 1.2 %. Were all small packets to pass, the last ones
of a message would overtake the others of their connection, and TCP would send again what was only overtaken: up to 15 %
more bytes.
"""

import math

from benchmarks.network.links import Interface, run

PAYLOAD_SHARE = 1448 / 1514
"""Of the rate, what is left for a TCP stream's bytes: packets of 1500 bytes, with all headers."""

SMALLEST_BITS_PER_S = 1_000_000.0
"""Below it the assured rate of the bulk would matter; and a rate that small was probably meant in another unit."""


def check_rate(name: str, bits_per_s: float | None) -> None:
    """Raise `ValueError` unless the rate is `None`, for unlimited, or a possible one."""
    if bits_per_s is not None and not SMALLEST_BITS_PER_S <= bits_per_s < math.inf:
        raise ValueError(
            f"{name} is {bits_per_s}; expected bits per second, finite and at least {SMALLEST_BITS_PER_S:.0f}, or None"
        )


def payload_bytes_per_s(bits_per_s: float) -> float:
    """What programs get out of a link of this rate, in one direction, in bytes per second."""
    return bits_per_s / 8 * PAYLOAD_SHARE


def set_rate(at: Interface, bits_per_s: float | None) -> None:
    """Limit what an interface sends; `None`: no limit.

    Raises:
        ValueError: an impossible rate.
        RuntimeError: `tc` failed; with the command and what it said.
    """
    check_rate("bits_per_s", bits_per_s)
    if "htb" in run("tc", "-n", at.namespace, "qdisc", "show", "dev", at.device, "root"):
        tc(at, "qdisc del dev {device} root")
    if bits_per_s is None:
        return
    rate = f"{bits_per_s:.0f}bit"
    # A millisecond's worth, and not less than a few large packets.
    burst = f"burst {max(16384, math.ceil(bits_per_s / 8000))} cburst {max(16384, math.ceil(bits_per_s / 8000))}"
    tc(at, "qdisc add dev {device} root handle 1: htb default 20 r2q 1000")
    tc(at, f"class add dev {{device}} parent 1: classid 1:1 htb rate {rate} ceil {rate} {burst} quantum 60000")
    first = f"htb rate {rate} ceil {rate} {burst} prio 0 quantum 60000"
    then = f"htb rate 64kbit ceil {rate} {burst} prio 1 quantum 60000"
    tc(at, f"class add dev {{device}} parent 1:1 classid 1:10 {first}")
    tc(at, f"class add dev {{device}} parent 1:1 classid 1:20 {then}")
    # Long queues: nothing is lost, so nothing is sent twice.
    tc(at, "qdisc add dev {device} parent 1:10 pfifo limit 10000")
    tc(at, "qdisc add dev {device} parent 1:20 pfifo limit 20000")
    # First pass IP packets of less than 64 bytes, so no data, and address resolution.
    tc(at, "filter add dev {device} parent 1: protocol ip prio 1 u32 match u16 0x0000 0xffc0 at 2 flowid 1:10")
    tc(at, "filter add dev {device} parent 1: protocol arp prio 2 u32 match u32 0 0 flowid 1:10")


def tc(at: Interface, command: str) -> None:
    """`tc` in the namespace of an interface, which the command calls `{device}`."""
    run("tc", "-n", at.namespace, *command.format(device=at.device).split())
