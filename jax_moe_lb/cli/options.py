"""Several commands share these options.

Numbers arrive as text, because what typer says of a bad one differs between its versions, and some leave out the value.
"""

from pathlib import Path
from typing import Annotated

import typer

Balancer = Annotated[
    str, typer.Option("--balancer", metavar="NAME", help="It plans: plain, greedy or another file of balancers/.")
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


def positive(argument: str, text: str | None) -> int | None:
    """Parses the number of an option, `None` if the option was not given.

    Args:
        argument: the option's name, for the message.
        text: what the user wrote.

    Raises:
        ValueError: it is no integer, or below 1.
    """
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{argument} is {text!r}; expected an integer, at least 1")
    return int(text)
