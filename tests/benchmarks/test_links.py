"""Links of the simulator take as long as flows that share them, in all-to-alls between network interfaces."""

import numpy as np
import pytest

from benchmarks.network.rail_cases import NODES, RAILS, cases, scaled, sprayed
from benchmarks.network.rails import NODE_ROWS
from benchmarks.network.shaping import payload_bytes_per_s
from benchmarks.network.ways import ROW_BYTES
from benchmarks.papers.sim_networks import AT_ONCE, RESULTS, measured, rail_points
from jax_moe_lb.core.plan import rows_between
from jax_moe_lb.layer import systems
from jax_moe_lb.sim import Cluster, Links
from jax_moe_lb.sim.network import flow, seconds
from jax_moe_lb.transport.wave_rows import WaveRows


def by_links(bits_per_s):
    """Return the seconds of every case and way, with unlimited links inside nodes."""
    nics = Links("node", NODES, payload_bytes_per_s(bits_per_s), RAILS)
    cluster = Cluster((nics, Links("gpu", RAILS, AT_ONCE)))
    for name, weights in cases(0).items():
        counts = scaled(weights, NODE_ROWS)
        plan = sprayed(counts)
        rows = rows_between(counts, plan)
        sprayed_hops = systems.rails().dispatch.cost().hops(WaveRows(counts, plan, per_token=1), cluster.topology())
        ways = {"direct": [rows], "receiver's rail": [at_receivers_rail(rows)], "sprayed": sprayed_hops}
        for way, hops in ways.items():
            yield (name, way), sum(seconds(flow(hop * ROW_BYTES, cluster), cluster) for hop in hops)


def at_receivers_rail(rows):
    """Return rows with all traffic of a node to a rank sent by the interface of that rank's offset."""
    nodes = rows.reshape(NODES, RAILS, NODES, RAILS)
    sent = np.zeros_like(nodes)
    for offset in range(RAILS):
        sent[:, offset, :, offset] = nodes[:, :, :, offset].sum(1)
    return sent.reshape(rows.shape)


def test_links_of_the_simulator_take_as_long_as_flows_that_share_them():
    results = measured(RESULTS, "network_rails")
    links = dict(by_links(results[0]["nic_bits_per_s"]))
    points = {(point.case, point.way): point for point in rail_points(results)}
    assert links == pytest.approx({key: point.simulated_s for key, point in points.items()}, rel=2e-3)
    off = [abs(links[key] / point.measured_s - 1) for key, point in points.items()]
    assert np.mean(off) < 0.02
