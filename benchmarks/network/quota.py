"""CPU quotas of ranks: control groups of Linux, version 1 or 2.

A quota limits the CPU time of a rank's threads in every period. If the quotas add up to less than the cores and the
groups have a high weight, other work on the machine changes the times of ranks little.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

ROOTS = {1: Path("/sys/fs/cgroup/cpu"), 2: Path("/sys/fs/cgroup")}
"""Folders of both versions."""

PERIOD_US = 5000
"""Period of the quota. With the default of 100 ms, a message would wait up to a period for its rank."""

SMALLEST_QUOTA_US = 1000
"""Minimum quota accepted by the kernel."""

WEIGHTS = {1: ("cpu.shares", 262144), 2: ("cpu.weight", 10000)}
"""Maximum weights against other work on the machine."""


def version() -> int:
    """Return the version of the control groups of the CPU controller."""
    if (ROOTS[1] / "cpu.shares").exists():
        found = 1
    elif "cpu" in _text(ROOTS[2] / "cgroup.subtree_control").split():
        found = 2
    else:
        raise RuntimeError("no control groups with the CPU controller in /sys/fs/cgroup")
    if not os.access(ROOTS[found], os.W_OK):
        raise RuntimeError(f"{ROOTS[found]} is not writable")
    return found


class CpuGroup:
    """Control group of one rank."""

    def __init__(self, name: str) -> None:
        self.version = version()
        self.folder = ROOTS[self.version] / name

    def create(self) -> None:
        """Create the group, without a quota."""
        self.folder.mkdir()
        file, weight = WEIGHTS[self.version]
        (self.folder / file).write_text(str(weight))

    def remove(self) -> None:
        """Remove the group; its processes must have ended."""
        self.folder.rmdir()

    def enter(self) -> None:
        """Move this process with all its threads into the group."""
        (self.folder / "cgroup.procs").write_text("0")

    def limit(self, cores: float | None) -> None:
        """Set the quota in cores; `None` removes it."""
        if cores is not None and not cores * PERIOD_US >= SMALLEST_QUOTA_US:
            raise ValueError(f"cores is {cores}; expected at least {SMALLEST_QUOTA_US / PERIOD_US}, or None")
        quota = None if cores is None else round(cores * PERIOD_US)
        if self.version == 1:
            # A quota must never exceed the old period, so it is lifted first.
            (self.folder / "cpu.cfs_quota_us").write_text("-1")
            (self.folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self.folder / "cpu.cfs_quota_us").write_text(str(-1 if quota is None else quota))
        else:
            (self.folder / "cpu.max").write_text(f"{'max' if quota is None else quota} {PERIOD_US}")


@contextlib.contextmanager
def cpu_groups(count: int) -> Iterator[list[CpuGroup]]:
    """Create a group for each rank, and remove them afterwards."""
    made: list[CpuGroup] = []
    try:
        for rank in range(count):
            group = CpuGroup(f"jax_moe_lb_{os.urandom(4).hex()}_{rank}")
            group.create()
            made.append(group)
        yield made
    finally:
        for group in made:
            group.remove()


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
