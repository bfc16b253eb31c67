"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

System = Annotated[
    str, typer.Option("--system", metavar="NAME", help="A balancer: plain, greedy or another file of balancers/.")
]
RanksPerDomain = Annotated[
    int | None,
    typer.Option("--ranks-per-domain", metavar="M", min=1, help="Ranks among which experts may move; R by default."),
]
Slots = Annotated[
    int | None, typer.Option("--slots", metavar="S", min=1, help="Slots per rank; home experts + 2 by default.")
]
ExpertBytes = Annotated[
    int | None, typer.Option("--expert-bytes", metavar="N", min=1, help="Show weights moved, at N bytes per expert.")
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="PLAN.npz", help="Write placement and quota of all plans there.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
