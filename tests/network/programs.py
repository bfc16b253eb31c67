"""Programs of tests in a sandbox: `python -m tests.network.programs NAME`; the last line is the result as JSON."""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from functools import partial

from benchmarks.network import sandbox, topologies
from benchmarks.network.launch import RanksFailed, launch
from benchmarks.network.rail_cases import cases, plan_of, scaled
from benchmarks.network.rails import measure, result_of
from benchmarks.network.ways import Ways

NUM_BYTES = 1_000_000


def transfer(network, source, to):
    """Send bytes between ranks; return the receiver's seconds, and the bytes sent by NICs."""
    before = network.counters()
    times_s = launch(network, lambda rank: send(rank, source, to), deadline_s=20)
    sent = [after.sent_bytes - b.sent_bytes for after, b in zip(network.counters(), before, strict=True)]
    return {"seconds": times_s[to], "sent_bytes": sent}


def send(rank, source, to, num_bytes=NUM_BYTES):
    if rank.index == to:
        with socket.create_server((rank.address, 5000)) as server:
            connection = server.accept()[0]
            start_s, left = time.perf_counter(), num_bytes
            while left:
                left -= len(connection.recv(1 << 20))
            connection.close()
            return time.perf_counter() - start_s
    if rank.index == source:
        for _ in range(100):
            with contextlib.suppress(ConnectionRefusedError):
                connection = socket.create_connection((rank.hosts[to].address, 5000), 10, (rank.address, 0))
                break
            time.sleep(0.02)
        connection.sendall(bytes(num_bytes))
        connection.close()
    return None


def two_datacenters():
    """Return seconds and bytes over a slow link, in both directions and in neither."""
    results = []
    for source, to, rate in [(0, 2, 20e6), (3, 1, 20e6), (2, 3, 20e6), (0, 2, None)]:
        with topologies.two_datacenters(2, rate) as network:
            results.append(transfer(network, source, to))
    return results


def rails():
    """Return bytes sent by every NIC, from rank 0 to ranks of the other node, by topology and receiver."""
    makers = {"spine": partial(topologies.rails, 2, 2, 100e6), "switch": partial(topologies.one_switch, 4)}
    makers["multipath"] = partial(topologies.multipath, 2, 2, 100e6)
    results = {}
    for name, make in makers.items():
        with make() as network:
            for to in (1, 2, 3):
                results[f"{name} {to}"] = transfer(network, 0, to)["sent_bytes"]
    return results


def sprayed_rows():
    """Return seconds and NIC deviations of a skewed exchange between two nodes, direct and sprayed."""
    counts = scaled(cases(0)["hot pair"], 2000)
    rows, rails = plan_of(counts)
    ways = {"straight": Ways.straight(rows), "sprayed": Ways.along_rails(rails)}
    with topologies.rails(2, 4, 50e6) as network:
        trials = measure(network, ways, repeats=3, reconnect=False)
    results = {name: result_of(trials[name], ways[name], 50e6) for name in ways}
    return {name: {"seconds": result.median_s, "off_plan": result.off_plan} for name, result in results.items()}


def failures():
    """Return the parent's messages about failing ranks, and their delays."""

    def by_signal(rank):
        if rank.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def by_exception(rank):
        if rank.index == 0:
            raise ValueError("the wrong number of tokens: 17")
        time.sleep(60)

    def too_late(rank):
        print("still waiting", file=sys.stderr)
        time.sleep(60 * rank.index)

    results = []
    with topologies.two_datacenters(1, 1e8) as network:
        for body in (by_signal, by_exception, too_late):
            start_s = time.monotonic()
            try:
                launch(network, body, deadline_s=2)
            except RanksFailed as error:
                results.append({"message": str(error), "seconds": time.monotonic() - start_s})
    return results


def wait():
    """Run ranks that report and then wait forever."""

    def body(rank):
        print(f"rank {rank.index} is there", flush=True)
        threading.Event().wait()

    with topologies.two_datacenters(2, 1e8) as network:
        launch(network, body, deadline_s=120)


LAYER = (512, 128, 128)
"""`T`, `H`, `F` of the layer below."""


def layer():
    """Return outputs and gradients of a layer across two datacenters, by rank, and bytes on the link between."""
    from benchmarks.network.jax_ranks import barrier, check_same_program, launch_jax
    from benchmarks.network.layer import PLAIN, Choice, Sizes, jitted_step

    def body(rank):
        import jax

        results = []
        for choice in (PLAIN, Choice(2, 1)):
            step, args = jitted_step(choice, Sizes(*LAYER))
            lowered = step.lower(*args)
            check_same_program(lowered.as_text())
            program = lowered.compile({"xla_backend_optimization_level": 0})
            out = program(*args)
            barrier("compiled")
            before = rank.network.counters() if rank.index == 0 else ()
            barrier("counted")
            jax.block_until_ready(program(*args))
            barrier("done")
            after = rank.network.counters() if rank.index == 0 else ()
            sent = [end.sent_bytes - start.sent_bytes for start, end in zip(before, after, strict=True)]
            results.append({"sent_bytes": sent, "leaves": [samples(leaf) for leaf in jax.tree.leaves(out)]})
        return results

    with topologies.two_datacenters(1, 500e6) as network:
        return launch_jax(network, body, devices_per_process=2, deadline_s=60)


def samples(leaf):
    """Return start and sampled values of every block on this process."""
    shards = leaf.addressable_shards
    return [([part.start or 0 for part in one.index], one.data.reshape(-1)[::97].tolist()) for one in shards]


def dead_rank():
    """Return the parent's message about a rank dying during an exchange, and its delay."""
    from benchmarks.network.jax_ranks import barrier, launch_jax

    def prepare(rank):
        os.environ["PREPARED"] = str(rank.index)

    def body(rank):
        assert os.environ["PREPARED"] == str(rank.index)
        barrier("all there")
        if rank.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        barrier("never")

    with topologies.two_datacenters(1, 500e6) as network:
        start_s = time.monotonic()
        try:
            launch_jax(network, body, devices_per_process=1, deadline_s=60, prepare=prepare)
        except RanksFailed as error:
            return {"message": str(error), "seconds": time.monotonic() - start_s}


if __name__ == "__main__":
    sandbox.enter()
    print(json.dumps(globals()[sys.argv[1]]()))
