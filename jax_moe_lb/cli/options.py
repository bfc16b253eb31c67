"""Several commands share these options.

Numbers arrive as text, because what typer says of a bad one differs between its versions, and some leave out the value.
"""

from pathlib import Path
from typing import Annotated

import typer

from jax_moe_lb.sim.limits import shown

Balancer = Annotated[
    str,
    typer.Option(
        "--balancer",
        metavar="NAME[:KEY=VALUE,...]",
        help="It plans: plain, greedy, exact:eps=0.05, ultraep+rails or another file of balancers/.",
    ),
]
RanksPerDomain = Annotated[
    str | None,
    typer.Option("--ranks-per-domain", metavar="M", help="Ranks among which experts may move; R by default."),
]
Slots = Annotated[str | None, typer.Option("--slots", metavar="S", help="Slots per rank; home experts + 2 by default.")]
ExpertBytes = Annotated[
    str | None, typer.Option("--expert-bytes", metavar="N", help="Show weights moved, at N bytes per expert.")
]
Out = Annotated[Path | None, typer.Option("--out", metavar="PLAN.npz", help="Write all plans there, for Plan.load.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


MOST = 10**18
"""No number of an option is larger: an expert of so many bytes, which is the largest that anybody may ask for."""


def positive(argument: str, text: str | None, most: int = MOST) -> int | None:
    """Parses the number of an option, `None` if the option was not given.

    Args:
        argument: the option's name, for the message.
        text: what the user wrote.
        most: the largest number that the option takes.

    Raises:
        ValueError: it is no integer, below 1, or above `most`.
    """
    if text is None:
        return None
    # Without leading zeros; Python refuses to read thousands of digits.
    digits = text.lstrip("0") if text.isdecimal() else ""
    if not digits or len(digits) > len(str(most)) or not 1 <= int(digits) <= most:
        wanted = f"from 1 to {most}" if digits else "at least 1"
        raise ValueError(f"{argument} is {shown(text)}; expected an integer, {wanted}")
    return int(digits)
