"""Peer access between processes of one machine, with one GPU each: detection and connection.

Processes exchange addresses through the key-value store of `jax.distributed`, while they trace the first program with
copies. This happens once per process and once per set of processes. All decisions depend only on this store, so they
agree. Later calls use the cached result.
"""

import functools
import importlib
import json
import os
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jax_moe_lb.core.custom_calls import MODULES, is_built

PATIENCE_S = 120.0
"""Timeout in seconds for messages of other processes, which trace at about the same time."""

PREFIX = "jax_moe_lb/neighbours"


@runtime_checkable
class JobStore(Protocol):
    """Key-value store of all processes of a job, such as the one of `jax.distributed`, which ends with the job."""

    def key_value_set(self, key: str, value: str) -> None:
        """Set a key once."""

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Return the value of a key, after waiting for it."""


@runtime_checkable
class Calls(Protocol):
    """Functions of `_ffi_cuda` used by this module."""

    def listen(self) -> str:
        """Return the address of this process for others."""

    def connect(self, own: int, addresses: dict[int, str], timeout_s: float) -> str | None:
        """Connect this process with others; return the reason of a failure, or `None`."""

    def try_peers(self, processes: list[int], address: int, device: int, timeout_s: float) -> str | None:
        """Copy from an array of all other processes; return the reason of a failure, or `None`."""


def are_together(processes: Sequence[int], domain: int, hosts: dict[int, str]) -> bool:
    """Return whether every `domain` consecutive ranks are distinct processes of one machine."""
    if len(set(processes)) < len(processes):
        return False
    blocks = [processes[first : first + domain] for first in range(0, len(processes), domain)]
    return all(len({hosts[process] for process in block}) == 1 for block in blocks)


def introduce(own: int, store: JobStore, calls: Calls, host: str, problem: str | None) -> None:
    """Publish the address of this process, or the reason why its memory cannot be shared; once per process."""
    address = calls.listen() if problem is None else ""
    store.key_value_set(f"{PREFIX}/{own}", json.dumps({"host": host, "address": address, "problem": problem}))


@dataclass(frozen=True)
class Probe:
    """Array copied by other processes, to try peer access."""

    address: int  # address of an int32 with the index of this process, which stays allocated
    device: int  # CUDA's number of the device


def no_peer_access_reason(
    own: int, processes: Sequence[int], domain: int, store: JobStore, calls: Calls, probe: Probe
) -> str | None:
    """Connect this process with those of the domain; return why some cannot copy from each other, or `None`."""
    if own not in processes or len(set(processes)) < len(processes):
        return "ranks are not processes of their own"
    said = {process: json.loads(_ask(store, f"{PREFIX}/{process}", process)) for process in processes}
    for process, words in said.items():
        if words["problem"] is not None:
            return f"process {process}: {words['problem']}"
    if not are_together(processes, domain, {process: words["host"] for process, words in said.items()}):
        return "a domain has processes of several machines"
    first = processes.index(own) // domain * domain
    addresses = {process: said[process]["address"] for process in processes[first : first + domain]}
    group = f"{PREFIX}/{zlib.crc32(json.dumps([list(processes), domain]).encode()):08x}"
    # A failure of one process is a reason for all, because they run one program.
    if problem := _first_problem(f"{group}/connect", own, processes, store, calls.connect(own, addresses, PATIENCE_S)):
        return problem
    tried = calls.try_peers(sorted(addresses), probe.address, probe.device, PATIENCE_S)
    return _first_problem(f"{group}/try", own, processes, store, tried)


def _first_problem(key: str, own: int, processes: Sequence[int], store: JobStore, problem: str | None) -> str | None:
    """Publish the problem of this process, wait for all processes, and return the first problem."""
    store.key_value_set(f"{key}/{own}", problem or "")
    found = [
        f"process {process}: {words}" for process in processes if (words := _ask(store, f"{key}/{process}", process))
    ]
    return found[0] if found else None


def _ask(store: JobStore, key: str, process: int) -> str:
    try:
        return store.blocking_key_value_get(key, int(PATIENCE_S * 1000))
    except Exception as error:
        raise RuntimeError(
            f"process {process} did not respond within {PATIENCE_S} s; expected all processes to trace the same program"
        ) from error


@functools.cache
def can_copy(processes: tuple[int, ...], domain: int) -> bool:
    """Connect the processes of every domain; return whether they can copy from each other's GPUs."""
    # Call it on all processes, while a program is traced. It returns False without `jax.distributed`, on backends other
    # than GPUs, and without the custom calls.
    store = _store_of_job()
    if store is None or jax.default_backend() != "gpu" or not is_built("cuda"):
        return False
    probe = _introduce_this_process()
    calls = importlib.import_module(MODULES["cuda"])
    problem = no_peer_access_reason(jax.process_index(), processes, domain, store, calls, probe)
    if problem is not None:
        _warn(problem)
    return problem is None


@functools.cache
def can_copy_inside() -> bool:
    """Return whether all GPUs of all processes can copy from each other's memory."""
    # Call it on all processes, while a program is traced. It returns True on backends other than GPUs and without the
    # custom calls.
    # Warns:
    #     RuntimeWarning: a pair of GPUs has no peer access.
    if jax.default_backend() != "gpu" or not is_built("cuda"):
        return True
    problem = importlib.import_module(MODULES["cuda"]).why_no_peer_access()
    if (store := _store_of_job()) is not None:
        problem = _first_problem(f"{PREFIX}/inside", jax.process_index(), range(jax.process_count()), store, problem)
    if problem is not None:
        _warn(problem)
    return problem is None


def warn_of_shared_processes() -> None:
    """Warn that a domain spans several processes of several GPUs each, on GPUs with the custom calls."""
    # Copies inside of a process need no messages, and copies between processes need one GPU each.
    # Warns:
    #     RuntimeWarning: on GPUs.
    if jax.default_backend() == "gpu" and is_built("cuda"):
        _warn("a domain has several processes with several GPUs each; start one process per GPU, or one per domain")


@functools.cache
def _warn(problem: str) -> None:
    message = f"weights are copied by XLA's collectives, not by copy engines: {problem}"
    warnings.warn(message, RuntimeWarning, stacklevel=2)


@functools.cache
def _introduce_this_process() -> Probe:
    calls = importlib.import_module(MODULES["cuda"])
    problem = "it has several GPUs" if jax.local_device_count() > 1 else None
    # XLA's allocator decides whether its allocations can be shared: test one. The cache keeps it allocated.
    array = _probe_array()
    probe = Probe(array.unsafe_buffer_pointer(), jax.local_devices()[0].local_hardware_id)
    if problem is None:
        problem = calls.why_not_shareable(probe.address, probe.device)
    store = _store_of_job()
    assert store is not None
    introduce(jax.process_index(), store, calls, host_name(), problem)
    return probe


@functools.cache
def _probe_array() -> jax.Array:
    # A traced program would get a tracer, which has no address.
    with jax.ensure_compile_time_eval():
        return jax.block_until_ready(jnp.full(1, jax.process_index(), jnp.int32))


def host_name() -> str:
    """Return an identifier of the running system and its network namespace, equal for processes with peer access."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    network = Path("/proc/self/ns/net")
    parts = boot.read_text().strip() if boot.exists() else "", os.stat(network).st_ino if network.exists() else 0
    return f"{parts[0]} {parts[1]}"


def _store_of_job() -> JobStore | None:
    # JAX has no public function for it.
    from jax._src import distributed

    return distributed.global_state.client
