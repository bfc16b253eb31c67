"""Sandbox for test networks: private namespaces for network, mounts and processes.

All processes form one tree below `unshare`. When its first process ends for any reason, the kernel removes processes,
interfaces and mounts. Requires Linux, iproute2, util-linux and either root or user namespaces.
"""

import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

INSIDE = Path("/run/jax_moe_lb_sandbox")
"""Marker file that exists only in a sandbox, which has its own `/run`."""

TOOLS = ("unshare", "setpriv", "mount", "ip", "tc")

SETUP = f"""
mount -t tmpfs tmpfs /run && mkdir -p /run/netns && : > {INSIDE} &&
ip link set lo up && exec "$@"
"""

PROBE = """
try() { said=$("$@" 2>&1) || { echo "\\`$*\\`: $said"; exit 1; }; }
try ip netns add probe
try ip link add probe0 type veth peer name probe1 netns probe
try ip link add probe2 type bridge
try tc qdisc add dev probe0 root handle 1: htb default 20
try tc class add dev probe0 parent 1: classid 1:1 htb rate 8mbit
try tc qdisc add dev probe0 parent 1:1 pfifo limit 100
try tc filter add dev probe0 parent 1: protocol ip prio 1 u32 match u16 0x0000 0xffc0 at 2 flowid 1:1
"""


def command(program: Sequence[str]) -> list[str]:
    """Return the command to run a program in a sandbox, killed with its parent."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    spaces = "--net --mount --pid --uts --fork --kill-child --mount-proc --propagation private"
    return ["unshare", *user, *spaces.split(), "sh", "-c", SETUP, "sh", *program]


def bound_to_parent(program: Sequence[str]) -> list[str]:
    """Return the command for a child process, which would otherwise outlive a killed parent."""
    return ["setpriv", "--pdeathsig", "KILL", "--", *command(program)]


@functools.cache
def missing() -> str | None:
    """Return the reason why no sandbox is possible: the failed step and its output; `None` if one is possible."""
    needs = "needs Linux, iproute2 with sch_htb, and root or user namespaces: "
    if sys.platform != "linux":
        return f"{needs}this is {sys.platform}"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"{needs}no {', '.join(absent)} on the PATH"
    done = subprocess.run(bound_to_parent(["sh", "-c", PROBE]), capture_output=True, text=True, timeout=60, check=False)
    said = (done.stdout + done.stderr).strip()
    return None if done.returncode == 0 else f"{needs}{said or f'unshare ended with {done.returncode}'}"


def inside() -> bool:
    """Return whether this process is in a sandbox."""
    return INSIDE.exists()


def enter() -> None:
    """Restart this program in a sandbox, unless it is in one. Call it first in `main`."""
    if inside():
        # The first process of a PID namespace ignores signals without a handler.
        signal.signal(signal.SIGTERM, _stop)
        return
    why_not = missing()
    if why_not:
        raise RuntimeError(why_not)
    sys.stdout.flush()
    program = command([sys.executable, *sys.orig_argv[1:]])
    os.execvp(program[0], program)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    sys.exit("stopped by SIGTERM")
