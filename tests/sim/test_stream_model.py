"""The model of expert domains, compared with the paper's tables and checked for consistency."""

import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe_lb import Topology
from jax_moe_lb.core import Level
from jax_moe_lb.sim import Work, benchmark_seconds, choose_expert_domains
from jax_moe_lb.sim.stream_model import choose_level, latency

# Table IV prints B as "128 Gbps". With 128 gigabits per second the model's optima differ from the published ones; with
# 128 gigabytes per second they agree. The paper's numbers were therefore computed in gigabytes.
PRINTED, MEANT = 128e9 / 8, 128e9
MIX_1 = Work(8e6, 4.7e6, 0.049e-3)
MIX_2 = Work(8e6, 2.35e6, 0.049e-3)
AG_ONLY_1 = Work(3e6, 0.094e6, 0.099e-3)
AG_ONLY_2 = Work(3e6, 0.047e6, 0.099e-3)
CASES = [(MIX_1, 2, 0.75), (MIX_2, 4, 0.5), (AG_ONLY_1, 8, 0.0), (AG_ONLY_2, 8, 0.0)]


@pytest.mark.parametrize(("work", "domain_size", "share"), CASES)
def test_optima_are_those_of_table_iv(work, domain_size, share):
    level = Level("gpu", 8, bytes_per_s=MEANT)
    assert choose_level(work, level).best.domain_size == domain_size
    # The paper labels a domain of S with p = 1 - S / G.
    assert 1 - domain_size / 8 == share


def test_optima_with_the_unit_that_table_iv_prints_are_others():
    level = Level("gpu", 8, bytes_per_s=PRINTED)
    assert [choose_level(work, level).best.domain_size for work, _, _ in CASES] == [1, 2, 8, 8]


def test_latencies_of_table_iv():
    level = Level("gpu", 8, bytes_per_s=MEANT)
    total_ms = [latency(MIX_2, level, size).total_s * 1e3 for size in (1, 2, 4, 8)]
    np.testing.assert_allclose(total_ms, [0.158, 0.143, 0.118, 0.129], atol=0.0006)


def test_inner_levels_pay_for_what_outer_ones_gathered():
    """The ablation of 24 & 8 MB: experts of about four domains are hidden, from any source."""
    work = Work(24e6, 8e6, 24e6 / MEANT)
    for outer, expected in [(1, (1, 4)), (2, (2, 2)), (4, (4, 1))]:
        topology = Topology((Level("node", outer, 10e9 / 8), Level("gpu", 8, MEANT)), 8)
        assert choose_expert_domains(work, topology).domain_sizes == expected
    big_tokens = Work(48e6, 2e6, 24e6 / MEANT)
    topology = Topology((Level("node", 4, 10e9 / 8), Level("gpu", 8, MEANT)), 8)
    assert choose_expert_domains(big_tokens, topology).domain_sizes == (4, 8)


def closed_form(work, level):
    """Return the best share of other members' experts reached by exchanges, `p = (G - S) / (G - 1)`, for any real S."""
    # Without latencies and backward pass. All experts are gathered if that is faster than exchanging all tokens.
    if 2 * work.token_bytes >= level.size * work.expert_bytes:
        return 0.0
    hidden = level.bytes_per_s * work.pre_expert_s / (work.expert_bytes * (level.size - 1))
    return min(max(1 - hidden, 0.0), 1.0)


def test_the_best_domain_is_next_to_the_closed_form():
    rng = np.random.default_rng(0)
    for _ in range(300):
        size = int(rng.choice([2, 4, 8, 12, 32]))
        work = Work(*10 ** rng.uniform(4, 9, 2), 10 ** rng.uniform(-6, 0))
        level = Level("dc", size, bytes_per_s=10 ** rng.uniform(6, 11))
        choice = choose_level(work, level)
        ideal = size - closed_form(work, level) * (size - 1)
        sizes = [candidate.domain_size for candidate in choice.candidates]
        below, above = max(s for s in sizes if s <= ideal + 1e-9), min(s for s in sizes if s >= ideal - 1e-9)
        assert choice.best.domain_size in (below, above)


def test_latency_and_the_gradients_way_home_count():
    level = Level("dc", 2, bytes_per_s=1e9, latency_s=0.05)
    work = Work(1e6, 1e6, 0.0)
    assert latency(work, level, 1).total_s == pytest.approx(2 * (0.0005 + 0.05))
    assert latency(work, level, 2).total_s == pytest.approx(0.001 + 0.05)
    train = Work(1e6, 1e6, 0.0, gradient_bytes=1e8, backward_s=0.01)
    assert latency(train, level, 1).total_s == pytest.approx(4 * (0.0005 + 0.05) + 0.01)
    assert latency(train, level, 2).total_s == pytest.approx(0.001 + 0.05 + 0.1 + 0.05)
    assert choose_level(work, level).best.domain_size == 2
    assert latency(replace(train, backward_exchanges=3), level, 1).total_s == pytest.approx(5 * (0.0005 + 0.05) + 0.01)


def test_the_choice_says_why():
    text = str(choose_expert_domains(MIX_2, Topology((Level("dc", 1), Level("gpu", 8, MEANT)), 8)))
    assert "dc: domains of 1 of 1; one member, so no exchange" in text
    assert "gpu: domains of 4 of 8; 0.006 ms of the gather are exposed, other tokens are exchanged" in text
    assert text.count("<-") == 2
    assert "no gather" in str(choose_expert_domains(MIX_1, Topology((Level("gpu", 8, PRINTED),), 8)))


def test_what_a_model_computes_is_measured():
    def before(x):
        def wait(x):
            time.sleep(0.02)
            return x

        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    assert 0.02 <= benchmark_seconds(before, jnp.ones(3), repeats=1) < 1
