"""Exchanges between processes: rows arrive, also via rail ranks, and NICs carry the traffic planned by `RailS`."""

import itertools
import socket
import threading
import time

import numpy as np
import pytest

from benchmarks.network.exchange import Shipment, Stalled
from benchmarks.network.rail_cases import NODES, RAILS, busiest_node, by_receiver, cases, plan_of, scaled
from benchmarks.network.ways import Ways, contents, expected
from tests.network.sandboxed import run


def shipment(rank, ways):
    return Shipment(rank, ways, [contents(rank, to, count) for to, count in enumerate(ways.rows[rank].sum(-1))])


@pytest.mark.thorough
@pytest.mark.netns
def test_sprayed_rows_are_faster_than_straight_ones_and_keep_to_the_plan():
    results = run("sprayed_rows")
    assert results["straight"]["off_plan"] < 0.03
    assert results["sprayed"]["off_plan"] < 0.03
    # A third on an idle machine.
    assert results["sprayed"]["seconds"] < 0.8 * results["straight"]["seconds"]


@pytest.mark.parametrize("along_rails", [False, True])
def test_rows_arrive_whole_in_order_and_from_whom_they_should(along_rails):
    rng = np.random.default_rng(1)
    rails = rng.integers(0, 60, (4, 4, 2))
    rails[np.arange(4), np.arange(4)] = 0
    ways = Ways.along_rails(rails) if along_rails else Ways.straight(rails.sum(-1))
    shipments = [shipment(rank, ways) for rank in range(4)]
    connections = [{} for _ in range(4)]
    for one, other in itertools.combinations(range(4), 2):
        connections[one][other], connections[other][one] = socket.socketpair()
    for connection in itertools.chain.from_iterable(ends.values() for ends in connections):
        connection.setblocking(False)
    threads = [threading.Thread(target=shipments[rank].run, args=(connections[rank], 20)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(4):
        np.testing.assert_array_equal(shipments[rank].arrived, expected(rank, ways))
        for connection in connections[rank].values():
            connection.close()


def test_rows_between_nodes_keep_to_their_rail():
    rows = np.zeros((4, 4, 2), int)
    rows[0, 3] = 5, 7
    passing = Ways.along_rails(rows).hops()
    # Via rank 2 on rail 0; via rank 1 on rail 1.
    found = {(one, other): passing[one, other] for one, other in np.argwhere(passing)}
    assert found == {(0, 2): 5, (2, 3): 5, (0, 1): 7, (1, 3): 7}


def test_a_stall_names_the_peers_and_is_bounded_in_time():
    ways = Ways.straight(np.array([[0, 2000], [3, 0]]))
    near, far = socket.socketpair()
    near.setblocking(False)
    with near, far:
        start_s = time.monotonic()
        with pytest.raises(Stalled, match=r"rank 0: .*3 rows from rank 1\], unsent \[\d+ bytes for rank 1"):
            shipment(0, ways).run({1: near}, 0.2)
        assert time.monotonic() - start_s < 2
        far.close()
        with pytest.raises(ConnectionError, match="rank 0: rank 1 closed its connection; 3 rows are missing"):
            shipment(0, ways).run({1: near}, 5)


def test_impossible_rows_are_refused_by_name():
    with pytest.raises(ValueError, match="rows has rows from rank 1 to itself"):
        Ways.straight(np.array([[0, 1], [1, 1]]))
    with pytest.raises(ValueError, match="rows has -1 rows from a rank to another"):
        Ways.straight(np.array([[0, -1], [1, 0]]))
    with pytest.raises(ValueError, match="rails has 3 rails for 4 ranks"):
        Ways.along_rails(np.zeros((4, 4, 3), int))


def test_plans_of_the_cases_are_even_over_rails():
    for name, weights in cases(0).items():
        rows, rails = plan_of(scaled(weights, 6000))
        assert busiest_node(rows) == pytest.approx(6000, rel=0.01)
        assert (rails.sum(-1) == rows).all()
        assert (by_receiver(rows).sum(-1) == rows).all()
        nodes = rails.reshape(NODES, RAILS, NODES, RAILS, RAILS).sum((1, 3))
        assert nodes.max() <= 1.02 * busiest_node(rows) / RAILS, name
