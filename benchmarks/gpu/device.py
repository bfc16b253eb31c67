"""Facts about the GPUs of this process, and times of kernels from XLA's profiler."""

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.profiler import ProfileData
from jax.stages import Compiled

from jax_moe_lb.aot.targets import GPUS


def gpu_kind() -> str | None:
    """Return the name of this GPU in `aot.targets.GPUS`; `None` if it has none."""
    return kind_in(jax.devices()[0].device_kind)


def kind_in(text: str) -> str | None:
    """Return the name of the GPU in a text, as in `aot.targets.GPUS`; `None` if there is none."""
    # Whole words: a GB200 is no B200, and a GH200 no H200.
    return next((word for word in re.findall(r"[a-z0-9]+", text.lower()) if word in GPUS), None)


def kernel_seconds(run: Callable[[], object], calls: int) -> dict[str, list[float]]:
    """Return the durations of all operations of the first device in some calls, by their name in the program."""
    jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                jax.block_until_ready(run())
        (file,) = Path(folder).rglob("*.xplane.pb")
        return _durations(ProfileData.from_file(str(file)))


def _durations(data: ProfileData) -> dict[str, list[float]]:
    on_gpu = jax.default_backend() == "gpu"
    found = defaultdict(list)
    for plane in data.planes:
        if plane.name != ("/device:GPU:0" if on_gpu else "/host:CPU"):
            continue
        for line in plane.lines:
            # Other lines of a GPU are sums of these.
            if on_gpu and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                if name := dict(event.stats).get("hlo_op", event.name if on_gpu else None):
                    found[str(name)].append(event.duration_ns * 1e-9)
    return found


def custom_call_seconds(target: str, kernel: str, program: Compiled, run: Callable[[], object]) -> float | None:
    """Return the median seconds of a custom call in a call of a program; `None` if the profile has none."""
    names = re.findall(rf'%?([\w.-]+) = .*custom_call_target="{target}"', program.as_text() or "")
    found = [seconds for name, seconds in kernel_seconds(run, 2).items() if name in names or kernel in name]
    return float(np.median(np.concatenate(found))) if found else None
