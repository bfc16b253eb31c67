"""Estimated times of exchanges equal hand-counted iterations, bytes and updates."""

import numpy as np
import pytest

from jax_moe_lb.collectives.exchange_paths import ExchangePath
from jax_moe_lb.collectives.exchange_time import Machine, collective_time, exchange_time, one_shot_block_s
from jax_moe_lb.core.device_rates import device_rates

H100 = device_rates("h100", "cuda")
NODE = Machine(H100, 8)
ROW, KIB = 4096, 1024


def sent(ranks=8, updates=1, nbytes=0):
    return np.full((ranks, ranks, updates), nbytes, np.int64)


def blocks_by_loop(sent, blocks, piece):
    """Count the pieces of every block one by one."""
    ranks, _, updates = sent.shape
    most = 0
    for source, peer, first in np.ndindex(ranks, ranks, updates // blocks):
        done = [0] * blocks
        for i in range(blocks):
            pieces = -(-int(sent[source, peer, first * blocks + i]) // piece)
            for number in range(pieces):
                # The block that copies this piece of update `i`.
                done[(number - i) % blocks] += 1
        most = max(most, *done)
    return most


@pytest.mark.parametrize("updates", [1, 6, 64])
def test_the_busiest_block_is_that_of_a_loop_over_pieces(updates):
    sizes = np.random.default_rng(updates).integers(0, 20 * KIB, (2, 2, updates))
    blocks = {1: 1, 6: 2, 64: 64}[updates]
    expected = blocks_by_loop(sizes, blocks, KIB) * H100.block_kib + blocks * H100.block_update
    assert one_shot_block_s(sizes, ROW, 2**15, H100) == pytest.approx(expected)


def test_narrow_rows_are_copied_in_narrow_vectors():
    sizes = sent(2, 1, 64 * KIB)
    wide, narrow = (one_shot_block_s(sizes, row, 2**15, H100) for row in (8, 4))
    assert narrow - H100.block_update == pytest.approx(2 * (wide - H100.block_update))


def test_empty_updates_share_an_exchange_among_more_blocks():
    whole = np.zeros((8, 8, 64), np.int64)
    # Updates of very different sizes.
    whole[..., 0] = 18 * 2**20
    few = exchange_time(whole[..., :18], ExchangePath.ONE_SHOT, ROW, 2**15, NODE)
    many = exchange_time(whole, ExchangePath.ONE_SHOT, ROW, 2**15, NODE)
    assert few.bound == "blocks"
    assert few.seconds > 5 * many.seconds


def test_a_link_counts_neither_the_own_rows_nor_both_directions():
    sizes = sent(8, 64, 0)
    np.einsum("iiu->iu", sizes)[:] = 2**24
    own = exchange_time(sizes, ExchangePath.DEVICE_KERNEL, ROW, 2**15, NODE)
    assert own.seconds == pytest.approx(H100.one_shot)
    sizes[0, 1] = sizes[1, 0] = 2**24
    both = exchange_time(sizes, ExchangePath.DEVICE_KERNEL, ROW, 2**15, NODE)
    share = np.interp(np.log(64), np.log([30, 120]), [0.157, 0.157])
    assert both.seconds == pytest.approx(H100.one_shot + 64 * 2**24 / (H100.link * share))


def test_the_device_kernel_is_fastest_with_one_update():
    one = exchange_time(sent(8, 1, 2**25), ExchangePath.DEVICE_KERNEL, ROW, 2**15, NODE)
    many = exchange_time(sent(8, 32, 2**20), ExchangePath.DEVICE_KERNEL, ROW, 2**15, NODE)
    assert (one.bound, many.bound) == ("link", "updates")
    assert many.seconds > 2 * one.seconds


def test_sends_and_receives_cost_an_update_each_although_empty():
    empty = exchange_time(sent(8, 18, 0), ExchangePath.SEND_RECEIVE, ROW, 2**15, NODE)
    assert empty.bound == "updates"
    assert empty.seconds == pytest.approx(7 * 18 * 12e-6 + H100.host_wait)


def test_between_domains_the_network_carries_the_rows():
    two = Machine(H100, 4)
    sizes = sent(8, 1, 2**20)
    found = exchange_time(sizes, ExchangePath.SEND_RECEIVE, ROW, 2**15, two)
    outside = 4 * 2**20 / (H100.network * H100.network_share)
    assert found.seconds == pytest.approx(H100.host_wait + 7 * 12e-6 + outside)


def test_the_busiest_link_of_a_torus():
    v5e = device_rates("v5e", "tpu")
    mesh = Machine(v5e, 8, (2, 4))
    sizes = sent(8, 1, 0)
    # Dimension-ordered: ranks 0 and 4 of one column meet in the row of their target.
    sizes[0, 6] = sizes[4, 7] = 10**9
    found = exchange_time(sizes, ExchangePath.NATIVE, ROW, 2**15, mesh)
    assert found.bound == "link"
    fixed = v5e.collective + 4 * v5e.hop
    assert found.seconds == pytest.approx(fixed + 2e9 / (v5e.link * v5e.link_share))


def test_other_collectives():
    small, large = (collective_time("all-gather", nbytes, 8, False, NODE) for nbytes in (8, 2**30))
    assert (small.bound, large.bound) == ("latency", "link")
    assert large.seconds == pytest.approx(H100.collective + 2**30 * 7 / 8 / (H100.link * H100.link_share))
    assert collective_time("all-reduce", 2**30, 8, False, NODE).seconds > large.seconds
    assert collective_time("all-gather", 2**30, 1, False, NODE).seconds == 0.0
    permute = collective_time("collective-permute", 2**30, 2, False, NODE)
    assert permute.seconds == pytest.approx(H100.collective + 2**30 / (H100.link * H100.link_share))
    assert collective_time("all-to-all", 2**30, 16, True, NODE).bound == "network"
