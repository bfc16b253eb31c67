"""Processes of one machine, with one GPU each, that copy from each other: who can, and how they find each other.

Names travel through the key-value store of `jax.distributed`, once for each process and each set of them, while the
first program that copies is traced: every process traces it. All that they decide by is in that store, so that all
decide alike. Later calls ask nobody.
"""

import functools
import importlib
import json
import logging
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jax_moe_lb.core.custom_calls import MODULES, is_built

PATIENCE_S = 120.0
"""How long a process waits for what another one has to say; they trace at about the same time."""

PREFIX = "jax_moe_lb/neighbours"


@runtime_checkable
class JobStore(Protocol):
    """What all processes of a job can read; `jax.distributed` has one, which ends with the job."""

    def key_value_set(self, key: str, value: str) -> None:
        """Says something, once."""

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Waits until somebody has said it."""


@runtime_checkable
class Calls(Protocol):
    """What `_ffi_cuda` does for it."""

    def listen(self) -> str:
        """Returns where others reach this process."""

    def connect(self, own: int, addresses: dict[int, str], timeout_s: float) -> str | None:
        """Connects this process with others, and returns why it cannot, if so."""


def are_together(processes: Sequence[int], domain: int, hosts: dict[int, str]) -> bool:
    """Says whether every `domain` consecutive ones are processes of their own on one machine.

    Args:
        processes: the process of each rank of each group, one group after the other.
        domain: how many consecutive ranks copy from each other; it divides their number.
        hosts: the machine of each process.
    """
    if len(set(processes)) < len(processes):
        return False
    blocks = [processes[first : first + domain] for first in range(0, len(processes), domain)]
    return all(len({hosts[process] for process in block}) == 1 for block in blocks)


def introduce(own: int, store: JobStore, calls: Calls, host: str, problem: str | None) -> None:
    """Tells the others, once for a process, where this one is, or why its memory cannot be shared."""
    address = calls.listen() if problem is None else ""
    store.key_value_set(f"{PREFIX}/{own}", json.dumps({"host": host, "address": address, "problem": problem}))


def no_peer_access_reason(own: int, processes: Sequence[int], domain: int, store: JobStore, calls: Calls) -> str | None:
    """Connects this process with those of its domain; returns why not all can copy from each other, or `None`.

    Args:
        own: the number of this process, which has introduced itself, as all of them do.
        processes: the process of each rank of each group, one group after the other.
        domain: how many consecutive ranks copy from each other.
        store: what all processes can read.
        calls: the custom calls for GPUs.

    Raises:
        RuntimeError: a process says nothing.
    """
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
    problem = calls.connect(own, addresses, PATIENCE_S)
    # One that could not connect is a reason for all, even for those that could: they run one program.
    group = f"{PREFIX}/{zlib.crc32(json.dumps([list(processes), domain]).encode()):08x}"
    store.key_value_set(f"{group}/{own}", problem or "")
    for process in processes:
        if words := _ask(store, f"{group}/{process}", process):
            return f"process {process}: {words}"
    return None


def _ask(store: JobStore, key: str, process: int) -> str:
    try:
        return store.blocking_key_value_get(key, int(PATIENCE_S * 1000))
    except Exception as error:
        raise RuntimeError(
            f"process {process} said nothing within {PATIENCE_S} s; expected all processes to trace the same program"
        ) from error


@functools.cache
def can_copy(processes: tuple[int, ...], domain: int) -> bool:
    """Says whether the processes of every domain can copy from each other's GPUs, and connects them.

    Ask it on all of them, while a program is traced. It is false where `jax.distributed` does not run, on backends
    other than GPUs, and where the custom calls were not built.

    Args:
        processes: the process of each rank of each group, one group after the other; see `Topology.processes`.
        domain: how many consecutive ranks copy from each other.
    """
    store = _store_of_job()
    if store is None or jax.default_backend() != "gpu" or not is_built("cuda"):
        return False
    _introduce_this_process()
    problem = no_peer_access_reason(
        jax.process_index(), processes, domain, store, importlib.import_module(MODULES["cuda"])
    )
    if problem is not None:
        logging.getLogger(__name__).info("weights are copied by XLA's collectives between processes: %s", problem)
    return problem is None


@functools.cache
def _introduce_this_process() -> None:
    calls = importlib.import_module(MODULES["cuda"])
    problem = "it has several GPUs" if jax.local_device_count() > 1 else None
    if problem is None:
        # Whether an allocation of XLA's can be shared depends on its allocator: one of them is tried.
        array = jax.block_until_ready(jnp.zeros(1))
        device = jax.local_devices()[0].local_hardware_id
        problem = calls.why_not_shareable(array.unsafe_buffer_pointer(), device)
    store = _store_of_job()
    assert store is not None
    introduce(jax.process_index(), store, calls, host_name(), problem)


def host_name() -> str:
    """Names what processes must share to reach each other: the running system, and its network as they see it."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    network = Path("/proc/self/ns/net")
    parts = boot.read_text().strip() if boot.exists() else "", os.stat(network).st_ino if network.exists() else 0
    return f"{parts[0]} {parts[1]}"


def _store_of_job() -> JobStore | None:
    # JAX has no public name for it.
    from jax._src import distributed

    return distributed.global_state.client
