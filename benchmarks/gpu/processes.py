"""Checks of copies between processes on one GPU: values, and the end of a process.

They cover the handles of IPC, mapped memory, words awaited by streams, and copy engines. They do not cover peer access
between two GPUs, NVLink, or a whole layer, whose collectives NCCL refuses for two processes on one GPU.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

from benchmarks.gpu.findings import Finding, Scale
from benchmarks.training.local_gloo import free_port
from jax_moe_lb.core.custom_calls import is_built

MEMORY_FRACTION = 0.1
LIMIT_S, START_S = 150.0, 60.0
"""Limit of copies, and of the time until all processes have copied once."""


def start(
    number: int, width: int, calls: int, *, on_gpu: bool, timeout_s: int = 60, folder: str | None = None
) -> list[subprocess.Popen[str]]:
    """Start processes that copy from each other; each writes its rank as a file of a folder after its first copy."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(MEMORY_FRACTION)}
    common = ["--number", number, "--port", free_port(), "--width", width, "--calls", calls]
    common += ["--timeout-s", timeout_s]
    command = [sys.executable, "-m", "benchmarks.gpu.process_rank", *map(str, common)]
    command += ["--platform", "cuda" if on_gpu else "cpu", *(["--copied", folder] if folder else [])]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    return [subprocess.Popen([*command, "--process", str(i)], **pipes) for i in range(number)]  # type: ignore[call-overload]


def stop(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def await_copies(processes: list[subprocess.Popen[str]], folder: Path) -> None:
    """Wait until all processes have copied once."""
    end = time.monotonic() + START_S
    while len(list(folder.iterdir())) < len(processes):
        for process in processes:
            if process.poll() is not None:
                raise AssertionError(f"a process ended before it copied: {process.communicate()[0][-400:]}")
        assert time.monotonic() < end, f"no copies within {START_S:.0f} s"
        time.sleep(0.1)


def copies_between(number: int, scale: Scale) -> Finding:
    """Check copies between a number of processes on one GPU."""
    if scale.dry and number > 2:
        return Finding(None, "not in a dry run")
    on_gpu = jax.default_backend() == "gpu"
    if on_gpu and not is_built("cuda"):
        return Finding(None, "the CUDA module is not built")
    processes = start(number, scale.of(1024, 16), scale.of(200, 2), on_gpu=on_gpu)
    try:
        said = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    finally:
        stop(processes)
    for process, text in zip(processes, said, strict=True):
        assert process.returncode == 0, text[-400:]
    return Finding(True, next(line for line in said[0].splitlines() if " calls by " in line))


def ended_process_is_named(scale: Scale) -> Finding:
    """Check that the others end after one process is killed, at the time limit of their waits, with its number."""
    if jax.default_backend() != "gpu" or not is_built("cuda"):
        return Finding(None, "collectives of XLA copy on CPUs, without a process group of this library")
    with tempfile.TemporaryDirectory() as folder:
        processes = start(2, 256, 10**6, on_gpu=True, timeout_s=5, folder=folder)
        try:
            await_copies(processes, Path(folder))
            processes[1].kill()
            begin = time.monotonic()
            said = processes[0].communicate(timeout=30.0)[0]
        finally:
            stop(processes)
    seconds = time.monotonic() - begin
    names = ("rank 1 of 2 has ended", "process 1: it has ended")
    named = next((line for line in said.splitlines() if any(name in line for name in names)), None)
    return Finding(named is not None, f"{seconds:.1f} s: {named or said.splitlines()[-1]}"[:300])
