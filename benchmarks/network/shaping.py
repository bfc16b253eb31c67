"""Rate limit of an interface: a token bucket with priority for packets without data.

With a single queue, acknowledgements wait behind the bulk of the other direction and the link idles. Transfers then
take 6 to 25 % longer than bytes over bandwidth; with priority, at most 1.2 %. Giving priority to all small packets
would reorder the last ones of a message, and TCP would retransmit them: up to 15 % more bytes.
"""

import math

from benchmarks.network.links import Interface, run

PAYLOAD_SHARE = 1448 / 1514
"""Fraction of the rate available to TCP payload: packets of 1500 bytes, with all headers."""

SMALLEST_BITS_PER_S = 1_000_000.0
"""Minimum rate. Below it the assured rate of the bulk would matter, and the unit is probably wrong."""


def payload_bytes_per_s(bits_per_s: float) -> float:
    """Return the payload rate of a link per direction, in bytes per second."""
    return bits_per_s / 8 * PAYLOAD_SHARE


def set_rate(at: Interface, bits_per_s: float | None) -> None:
    """Limit the sending rate of an interface; `None` removes the limit."""
    if bits_per_s is not None and not SMALLEST_BITS_PER_S <= bits_per_s < math.inf:
        least = f"{SMALLEST_BITS_PER_S:.0f}"
        raise ValueError(f"bits_per_s is {bits_per_s}; expected bits per second, finite and at least {least}, or None")
    if "htb" in run("tc", "-n", at.namespace, "qdisc", "show", "dev", at.device, "root"):
        tc(at, "qdisc del dev {device} root")
    if bits_per_s is None:
        return
    rate = f"{bits_per_s:.0f}bit"
    # One millisecond of data, at least a few large packets.
    burst_bytes = max(16384, math.ceil(bits_per_s / 8000))
    burst = f"burst {burst_bytes} cburst {burst_bytes}"
    tc(at, "qdisc add dev {device} root handle 1: htb default 20 r2q 1000")
    tc(at, f"class add dev {{device}} parent 1: classid 1:1 htb rate {rate} ceil {rate} {burst} quantum 60000")
    first = f"htb rate {rate} ceil {rate} {burst} prio 0 quantum 60000"
    then = f"htb rate 64kbit ceil {rate} {burst} prio 1 quantum 60000"
    tc(at, f"class add dev {{device}} parent 1:1 classid 1:10 {first}")
    tc(at, f"class add dev {{device}} parent 1:1 classid 1:20 {then}")
    # Long queues avoid loss, and thus retransmissions.
    tc(at, "qdisc add dev {device} parent 1:10 pfifo limit 10000")
    tc(at, "qdisc add dev {device} parent 1:20 pfifo limit 20000")
    # Priority for IP packets below 64 bytes, which have no data, and for ARP.
    tc(at, "filter add dev {device} parent 1: protocol ip prio 1 u32 match u16 0x0000 0xffc0 at 2 flowid 1:10")
    tc(at, "filter add dev {device} parent 1: protocol arp prio 2 u32 match u32 0 0 flowid 1:10")


def tc(at: Interface, command: str) -> None:
    """Run `tc` in the namespace of an interface, called `{device}` in the command."""
    run("tc", "-n", at.namespace, *command.format(device=at.device).split())
