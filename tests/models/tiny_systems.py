"""Train with each system as one of several processes: `python -m tests.models.tiny_systems PORT PROCESSES ID
SYSTEM...`.

Process 0 prints the losses as JSON.
"""

import dataclasses
import json
import os
import sys

import jax

from benchmarks.training.local_gloo import bind_gloo
from jax_moe_lb import raise_on_fault
from jax_moe_lb.core.virtual_devices import SCHEDULER_FLAG
from models.config import ModelConfig, ParallelConfig
from models.mesh import offer_cpu_devices
from models.multi_process.peer_monitor import PeerMonitor
from models.multi_process.rendezvous import Place, join
from tests.models.processes import JOIN_TIMEOUT_S
from tests.models.small import CONFIG, batch, programs

DEVICES = 8
STEPS = 3
SYSTEMS = {
    "plain": ParallelConfig(1, DEVICES, "plain"),
    "exact": ParallelConfig(1, DEVICES, "exact"),
    "hybridep": ParallelConfig(1, DEVICES, "hybridep", replica_slots=1, ranks_per_domain=2),
}
"""With HybridEP a rank also holds its neighbor's expert. The systems have the same state structure."""

MODEL = ModelConfig(num_layers=1, embed_dim=16, num_heads=2, mlp_dim=16, num_experts=8)


def losses(systems: list[str]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    first: list[jax.Array] = []
    for name in systems:
        config = dataclasses.replace(CONFIG, model=MODEL, parallel=SYSTEMS[name])
        made = programs(config)
        # Compile once; copy, as a step donates its state.
        first = first or jax.tree.leaves(made.init())
        state = jax.tree.unflatten(jax.tree.structure(made.state_shapes), [leaf.copy() for leaf in first])
        found[name] = []
        for step in range(1, STEPS + 1):
            state, loss, _, stats = made.step(state, batch(config, step))
            raise_on_fault(stats)
            found[name].append(float(loss))
    return found


def main(port: str, num_processes: str, process_id: str, *systems: str) -> None:
    place = Place("127.0.0.1", int(port), int(num_processes), int(process_id))
    bind_gloo()
    links = join(place, JOIN_TIMEOUT_S)
    offer_cpu_devices(DEVICES // place.num_processes)
    with PeerMonitor(place, links):
        found = losses(list(systems))
        assert len(jax.devices()) == DEVICES
        # XLA reads the flag at device initialization, after the processes have joined.
        assert f"{SCHEDULER_FLAG}=false" in os.environ["XLA_FLAGS"]
        if place.process_id == 0:
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
