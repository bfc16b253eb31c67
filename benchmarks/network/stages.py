"""Share of each stage in a step, from a profile of the running program.

XLA:CPU records the time of every operation. The names of its scopes in the compiled program give the stage.
"""

import glob
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax

INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = .*?\s([\w-]+)\(", re.MULTILINE)
SCOPES = re.compile(r'op_name="([^"]*)"')

CONTAINERS = {"while", "conditional", "call", "async-start", "async-done"}
"""Operations whose time is that of the operations inside them."""

EXCHANGES = ("collective-permute", "all-reduce", "all-gather", "all-to-all", "reduce-scatter")

STAGES = (
    ("weights", "replicate"),
    ("plan", "plan"),
    ("counts", "count"),
    ("dispatch", "dispatch"),
    ("combine", "combine"),
    ("experts", "experts"),
    ("router", "route"),
)
"""Stages by a scope of `moe`, first match first."""


def stages_of(text: str) -> dict[str, tuple[str, bool]]:
    """Return stage, and whether it is an exchange, of each operation of a compiled program."""
    found = {}
    for line in text.splitlines():
        match = INSTRUCTION.match(line)
        if match is None or match[2] in CONTAINERS:
            continue
        scopes = SCOPES.search(line)
        path = set(re.split(r"[/()]", scopes[1])) if scopes else set()
        stage = next((stage for stage, scope in STAGES if scope in path), "rest")
        found[match[1]] = (stage, match[2].removesuffix("-start").removesuffix("-done") in EXCHANGES)
    return found


def seconds_by_operation(call: Callable[[], Any]) -> dict[str, float]:
    """Profile a call and return the seconds of each operation of XLA:CPU."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        (file,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        data: Any = jax.profiler.ProfileData.from_file(file)
        seconds: dict[str, float] = defaultdict(float)
        for plane in data.planes:
            for line in plane.lines:
                for event in line.events:
                    if any(name == "hlo_op" for name, _ in event.stats):
                        seconds[event.name] += event.duration_ns / 1e9
    return dict(seconds)


def seconds_by_stage(seconds: dict[str, float], text: str) -> dict[str, float]:
    """Sum the seconds of operations by stage; exchanges are stages of their own."""
    stages, found = stages_of(text), defaultdict[str, float](float)
    for operation, each in seconds.items():
        if operation in stages:
            stage, travels = stages[operation]
            found[f"{stage}: exchange" if travels else stage] += each
    return dict(found)
