"""Discovery between processes of one machine, simulated by threads without a GPU."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jax_moe_lb.collectives import local_processes
from jax_moe_lb.collectives.local_processes import (
    Probe,
    are_together,
    can_copy,
    can_copy_inside,
    introduce,
    no_peer_access_reason,
)
from jax_moe_lb.collectives.peer_copy import Route, native_platforms
from jax_moe_lb.core.topology import Topology, _own_processes
from jax_moe_lb.transport import replicate as peer_copy
from jax_moe_lb.transport.replicate import PeerCopy


class Said:
    """Key-value store of a job, with a short timeout."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self.changed:
            assert key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, min(timeout_in_ms / 1000, 5)):
                raise TimeoutError(key)
            return self.values[key]


class Sockets:
    """Replacement of the custom calls, recording requested connections."""

    def __init__(self, own: int, problem: str | None = None, unreadable: str | None = None):
        self.own, self.problem, self.unreadable, self.connected, self.tried = own, problem, unreadable, {}, None

    def listen(self) -> str:
        return f"socket {self.own}"

    def connect(self, own: int, addresses: dict[int, str], timeout_s: float) -> str | None:
        assert own == self.own
        self.connected |= addresses
        return self.problem

    def try_peers(self, processes: list[int], address: int, device: int, timeout_s: float) -> str | None:
        self.tried = processes, address, device
        return self.unreadable


def ask_all(processes, domain, hosts, unshared=(), cannot_connect=(), cannot_read=()):
    store = Said()
    sockets = {
        own: Sockets(own, "refused" if own in cannot_connect else None, "unreadable" if own in cannot_read else None)
        for own in processes
    }

    def ask(own):
        introduce(own, store, sockets[own], hosts[own], "its memory is private" if own in unshared else None)
        return no_peer_access_reason(own, processes, domain, store, sockets[own], Probe(1000 + own, 0))

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(ask, processes)), sockets, store


def test_processes_of_a_machine_connect_inside_their_domain():
    hosts = dict.fromkeys((0, 2, 4, 6), "a") | dict.fromkeys((1, 3, 5, 7), "b")
    reasons, sockets, store = ask_all((0, 2, 4, 6, 1, 3, 5, 7), 4, hosts)
    assert reasons == [None] * 8
    assert sockets[4].connected == {0: "socket 0", 2: "socket 2", 4: "socket 4", 6: "socket 6"}
    assert sockets[4].tried == ([0, 2, 4, 6], 1004, 0)
    assert sockets[5].connected == {1: "socket 1", 3: "socket 3", 5: "socket 5", 7: "socket 7"}
    assert all(key.startswith("jax_moe_lb/neighbours/") for key in store.values)


@pytest.mark.parametrize(
    ("hosts", "unshared", "cannot_connect", "cannot_read", "reason"),
    [
        ("aabb", (), (), (), "a domain has processes of several machines"),
        ("aaaa", (2,), (), (), "process 2: its memory is private"),
        ("aaaa", (), (3,), (), "process 3: refused"),
        ("aaaa", (), (), (1,), "process 1: unreadable"),
    ],
)
def test_all_processes_decide_alike(hosts, unshared, cannot_connect, cannot_read, reason):
    reasons, *_ = ask_all((0, 1, 2, 3), 4, dict(enumerate(hosts)), unshared, cannot_connect, cannot_read)
    assert reasons == [reason] * 4


def test_a_process_that_says_nothing_is_named(monkeypatch):
    monkeypatch.setattr(local_processes, "PATIENCE_S", 0.1)
    store = Said()
    introduce(0, store, Sockets(0), "a", None)
    assert json.loads(store.values["jax_moe_lb/neighbours/0"]) == {"host": "a", "address": "socket 0", "problem": None}
    with pytest.raises(RuntimeError, match=r"process 1 did not respond within 0\.1 s"):
        no_peer_access_reason(0, (0, 1), 2, store, Sockets(0), Probe(0, 0))


def test_one_process_for_each_rank_on_one_machine():
    hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    assert are_together((0, 1, 2, 3), 2, hosts)
    assert not are_together((0, 1, 2, 3), 4, hosts)
    assert not are_together((0, 2, 1, 3), 2, hosts)
    assert not are_together((0, 0, 1, 1), 2, hosts)


def test_processes_are_read_off_the_mesh():
    def read(processes, axes):
        devices = np.vectorize(lambda process: SimpleNamespace(process_index=process), otypes=[object])(processes)
        return _own_processes(devices, ("data", "expert"), axes)

    assert read([[0, 1], [2, 3]], ("expert",)) == (0, 1, 2, 3)
    assert read([[0, 1], [2, 3]], ("data",)) == (0, 2, 1, 3)
    assert read([[0, 0], [1, 1]], ("expert",)) == ()
    assert read([[0]], ("expert",)) == ()


def test_copy_engines_are_chosen_where_processes_reach_each_other(monkeypatch):
    asked = []

    def can(processes, domain):
        asked.append((processes, domain))
        return domain == 2

    monkeypatch.setattr(peer_copy, "can_copy", can)
    apart = {"expert_axes": ("expert",), "ranks_per_process": 1, "processes": (0, 1, 2, 3)}
    near, far = (Topology(Topology.flat(4).levels, domain, **apart) for domain in (2, 4))
    assert PeerCopy().route(near) == Route(("expert",), "PeerCopy", domain=2, reach=False, processes=(0, 1, 2, 3))
    assert native_platforms(PeerCopy().route(near)) == ("cuda",)
    assert native_platforms(PeerCopy().route(far)) == ()
    assert asked[0] == ((0, 1, 2, 3), 2)
    # A single process with all ranks needs no discovery.
    asked.clear()
    assert native_platforms(PeerCopy().route(Topology.flat(4)))
    assert not asked


def test_without_other_processes_there_is_nobody_to_copy_from():
    assert not can_copy((0, 1), 2)


@pytest.fixture
def on_gpus(monkeypatch):
    """Pretend that the default backend is of GPUs with custom calls."""
    monkeypatch.setattr(local_processes.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(local_processes, "is_built", lambda platform: True)
    can_copy_inside.cache_clear()
    local_processes._warn.cache_clear()
    yield
    can_copy_inside.cache_clear()


def test_gpus_without_peer_access_use_collectives(monkeypatch, on_gpus):
    module = SimpleNamespace(why_no_peer_access=lambda: "device 1 has no peer access to device 0")
    monkeypatch.setattr(local_processes.importlib, "import_module", lambda name: module)
    with pytest.warns(RuntimeWarning, match=r"not by copy engines: device 1 has no peer access to device 0"):
        assert not can_copy_inside()
    assert native_platforms(PeerCopy().route(Topology.flat(4))) == ()
    module.why_no_peer_access = lambda: None
    can_copy_inside.cache_clear()
    assert native_platforms(PeerCopy().route(Topology.flat(4)))


def test_several_gpus_in_each_of_several_processes_are_named(monkeypatch, on_gpus):
    monkeypatch.setattr(peer_copy, "can_copy_inside", lambda: True)
    shared = Topology(Topology.flat(4).levels, 4, expert_axes=("expert",), ranks_per_process=2)
    with pytest.warns(RuntimeWarning, match="several processes with several GPUs each; start one process per GPU"):
        assert native_platforms(PeerCopy().route(shared)) == ()


def test_the_array_to_try_has_an_address_while_a_program_is_traced():
    local_processes._probe_array.cache_clear()
    found = []
    jax.jit(lambda x: found.append(local_processes._probe_array()) or x)(1)
    assert found[0].unsafe_buffer_pointer() != 0
    assert found[0].tolist() == [jax.process_index()]
