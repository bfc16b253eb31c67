"""Compilation of a program for a target, and the report on the result.

`quiet_stderr` suppresses compiler logs on stderr.
"""

import faulthandler
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered, Wrapped

from jax_moe_lb.aot.collectives import collectives
from jax_moe_lb.aot.compiler_options import compiler_options
from jax_moe_lb.aot.execution_counts import (
    answers_from_host,
    executed,
    host_waits,
    launches,
    total,
    with_counted_loops,
)
from jax_moe_lb.aot.flops import products
from jax_moe_lb.aot.hlo import Module, parse_module
from jax_moe_lb.aot.memory import MemoryTraffic, peak_buffers, temporary_bytes
from jax_moe_lb.aot.report import Operation, ProgramReport
from jax_moe_lb.aot.schedule import scheduled
from jax_moe_lb.aot.slice_transfers import transfers_between_slices
from jax_moe_lb.aot.targets import Target
from jax_moe_lb.collectives.exchange_paths import PathChoice, exchange_path
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.torus import slice_axes


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Suppress compiler logs on stderr, and print them if an exception other than `ValueError` or Ctrl-C occurs.

    The message of a `ValueError` is sufficient without the log. If the compiler ends this process, another process
    prints one line with the signal and the compiler's last message.

    Examples:
        >>> from jax_moe_lb.aot import quiet_stderr
        >>> with quiet_stderr():
        ...     answer = 42  # a compiler may warn here
    """
    sys.stderr.flush()
    # Compilers are native code and write to file descriptor 2, not to `sys.stderr`.
    stderr = os.dup(2)
    with tempfile.NamedTemporaryFile() as log, _crash_reporter(log.name, stderr):
        os.dup2(log.fileno(), 2)
        try:
            yield
        except (ValueError, KeyboardInterrupt):
            raise
        except BaseException:
            log.seek(0)
            os.write(stderr, log.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


_REPORT = """
import os, re, sys
if not sys.stdin.readline():
    with open(sys.argv[2], errors="replace") as file:
        log = file.read()
    signal = re.search(r"^Fatal Python error: (.*)$", log, re.M)
    fatal = re.findall(r"^F\\d{4} .*$", log, re.M)
    reason = "; ".join([signal[1] if signal else "no exit status", *fatal[-1:]])
    print(f"error: the compiler of JAX {sys.argv[1]} ends this process: {reason}", file=sys.stderr)
    os.unlink(sys.argv[2])
"""


@contextmanager
def _crash_reporter(log: str, stderr: int) -> Iterator[None]:
    """Run a process that prints the reason from the log if this process ends inside the context."""
    command = [sys.executable, "-I", "-S", "-c", _REPORT, jax.__version__, log]
    # In a session of its own, where Ctrl-C in a terminal does not reach it.
    reporter = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True)
    # Only Python's handler names the signal; the log is file descriptor 2 inside the context.
    adds_handler = not faulthandler.is_enabled()
    if adds_handler:
        faulthandler.enable(2)
    try:
        yield
    finally:
        if adds_handler:
            faulthandler.disable()
        reporter.communicate("completed\n")


MOST_ROWS = 40
"""Maximum number of listed buffers and operations, largest first."""


def compile_for(
    target: Target,
    program: Wrapped,
    args: tuple[Any, ...],
    mesh: Mesh,
    *,
    ideal_flops: int | None = None,
    options: Mapping[str, str | bool] | None = None,
) -> ProgramReport:
    """Compile a program for a target machine, without the machine, and report memory, work and communication per
    device.

    Call `use_no_accelerators` first. The program must not call the host: use no `HostCallback`.

    Args:
        target: Target machine.
        program: Result of `jax.jit`.
        args: Its arguments, as `jax.ShapeDtypeStruct`s with a `NamedSharding` on `mesh`.
        mesh: Mesh of the target's devices, such as `target.mesh()`.
        ideal_flops: Minimum floating-point operations per device for the program's result; None (default) if unknown.
        options: XLA compiler options for this program, by name without dashes; they override `compiler_options(mesh)`.
            If `xla_dump_to` names a folder, which should be empty, the dumps remain there.

    Returns:
        The report on one device.

    Raises:
        ValueError: The program calls the host, or the compiler rejects it, for example because it exceeds the memory.

    Examples:
        With the GPU compiler installed (`pip install '.[cuda]'` in a checkout):

        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import NamedSharding, PartitionSpec
        >>> from jax_moe_lb.aot import Target, compile_for, use_no_accelerators
        >>> use_no_accelerators()  # doctest: +SKIP
        >>> target = Target.parse("h100:1x8")
        >>> mesh = target.mesh()  # doctest: +SKIP
        >>> x = jax.ShapeDtypeStruct(
        ...     (4096, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec())
        ... )  # doctest: +SKIP
        >>> compile_for(target, jax.jit(jnp.dot), (x, x), mesh).hbm_bytes  # doctest: +SKIP
        100663296
    """
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        dumps = {"xla_dump_to": temporary, **(options or {}), "xla_dump_hlo_as_text": True}
        given = compiler_options(mesh, dumps)
        compiled = _compile(target, _lower(target, mesh, program, args), given)
        seconds = time.perf_counter() - start_s
        return read_report(target, compiled, mesh, Path(str(given["xla_dump_to"])), ideal_flops, seconds)


def _lower(target: Target, mesh: Mesh, program: Wrapped, args: tuple[Any, ...]) -> Lowered:
    # Third-party kernels query the default device for its architecture.
    with jax.default_device(mesh.devices.flat[0]):
        traced = program.trace(*args)
        try:
            return traced.lower(lowering_platforms=(target.platform,))
        except (RuntimeError, ValueError) as error:
            message = str(error)
            # The error message differs between platforms.
            if "callback" in message or "Unknown backend" in message:
                message = "it calls the host, which needs the device; expected no HostCallback"
            raise ValueError(f"the program has no form for {target.name}: {message}") from error


def _compile(target: Target, lowered: Lowered, options: dict[str, str | bool]) -> Compiled:
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"the compiler rejects the program for {target.name}: {error}") from error


def read_report(
    target: Target, compiled: Compiled, mesh: Mesh, folder: Path, ideal_flops: int | None, compile_s: float
) -> ProgramReport:
    """Build the report from a compiled program and its dumps."""
    module = with_counted_loops(parse_module(compiled.as_text() or ""))
    memory: Any = compiled.memory_analysis()
    # Several TPU slices run the program of one slice.
    between = slice_axes(mesh.devices, mesh.axis_names, mesh.axis_names)
    axes = {name: size for name, size in mesh.shape.items() if name not in between}
    traffic = MemoryTraffic(module, target.fast_spaces)
    moved = traffic.costs()
    # Later passes rename some operations, so read the module that belongs to these dumps.
    text = _dump(folder, "after_optimizations")
    assignment = _dump(folder, "buffer-assignment")
    thunks, annotations = "", ""
    waits: int | None = answers_from_host(module)
    if target.platform == "cuda":
        # XLA omits the first dump if its last passes make no change.
        thunks = _dump(folder, "thunk_sequence_after_thunk_passes") or _dump(folder, "thunk_sequence")
        annotations = _dump(folder, "thunk_metadata")
        waits = host_waits(module, thunks, annotations) if thunks else None
    buffers = peak_buffers(
        parse_module(text) if text else module, _dump(folder, "live-range"), assignment, target.fast_spaces
    )
    moved.sort(key=lambda cost: cost.total, reverse=True)
    return ProgramReport(
        target=target.name,
        devices=mesh.size,
        argument_bytes=memory.argument_size_in_bytes,
        # Results aliased with arguments need no memory of their own.
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temp_bytes=temporary_bytes(assignment, target.fast_spaces) or memory.temp_size_in_bytes,
        peak_bytes=sum(buffer.nbytes for buffer in buffers),
        memory_bytes=target.device.memory_bytes if target.device else None,
        buffers=tuple(buffers[:MOST_ROWS]),
        flops=total(products(module)),
        ideal_flops=ideal_flops,
        hbm_bytes=total(moved),
        operations=tuple(Operation.of(module, cost) for cost in moved[:MOST_ROWS]),
        collectives=(
            *transfers_between_slices(module, mesh.axis_names, between, traffic.nbytes),
            *collectives(module, axes, traffic.nbytes, partial(_path, mesh)),
        ),
        custom_calls=_custom_calls(module),
        host_waits=waits,
        compile_s=compile_s,
        schedule=scheduled(module, traffic, axes, partial(_path, mesh), launches(thunks, annotations)),
    )


def _path(mesh: Mesh, axes: tuple[str, ...]) -> PathChoice:
    return exchange_path(Topology.from_mesh(mesh, axes))


def _custom_calls(module: Module) -> dict[str, int]:
    found = executed(module, lambda _, one: int(one.opcode == "custom-call"))
    counted: Counter[str] = Counter()
    for cost in found:
        counted[cost.instruction.target] += cost.times
    return dict(counted)


def _dump(folder: Path, name: str) -> str:
    """Read the dump of this name of the largest program; empty if the compiler writes none."""
    files = [path for path in folder.iterdir() if re.search(rf"[._\-]{name}\.txt$", path.name)]
    return max((path.read_text() for path in files), key=len, default="")
