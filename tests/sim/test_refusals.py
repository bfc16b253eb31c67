"""Values that no machine, model or measurement has are refused with what was expected."""

import math
import re
from functools import partial

import numpy as np
import pytest

from jax_moe_lb import Topology
from jax_moe_lb.core import Level
from jax_moe_lb.layer import systems
from jax_moe_lb.sim import (
    Cluster,
    Communication,
    Drift,
    Links,
    MeasuredGemm,
    Migration,
    ModelShape,
    Parallel,
    Peers,
    Work,
    benchmark_seconds,
    choose_expert_domains,
    drifting_counts,
    fitted_drift,
    simulate,
    simulate_uniform,
)

GPU, NODE = Links("gpu", 4, 1e9), Links("node", 4, 1e9)
CLUSTER, MODEL = Cluster((GPU,)), ModelShape(2, 64, 32, 16, 2, 128)
link = partial(Links, name="gpu", size=2, bytes_per_s=1.0)
work = partial(Work, token_bytes=1.0, expert_bytes=1.0, pre_expert_s=0.0)
simulated = partial(simulate, systems.plain(), MODEL, CLUSTER)
drifting = partial(drifting_counts, MODEL, 8)

REFUSED = {
    "size is 0; expected at least 1": lambda: link(size=0),
    "bytes_per_s is 0.0; expected a finite number above 0": lambda: link(bytes_per_s=0.0),
    "bytes_per_s is inf": lambda: link(bytes_per_s=math.inf),
    "Links.latency_s is -1.0": lambda: link(latency_s=-1.0),
    "Links.name is 'rack'; expected one of dc, node, gpu": lambda: link(name="rack"),
    "links is 2; expected a divisor of the 1 ranks that share them": lambda: Cluster((Links("gpu", 4, 1e9, links=2),)),
    "Cluster.levels are ['gpu', 'node']": lambda: Cluster((GPU, NODE)),
    "Cluster.levels are ['gpu', 'gpu']": lambda: Cluster((GPU, GPU)),
    "dispatch_bytes is 0.0; expected more than 0 and at most 8": lambda: Communication(dispatch_bytes=0.0),
    # simulations
    "counts has shape (4, 8); expected [layers, R, E] with R = 4 and E = 16": lambda: simulated(np.ones((4, 8), int)),
    "counts has dtype float64; expected integers": lambda: simulated(np.ones((4, 16))),
    "domain_sizes is (3,); expected a divisor of each of the levels' sizes": lambda: simulate_uniform(
        MODEL, CLUSTER, migration=Migration((3,))
    ),
    "model has 10 experts; expected a positive multiple of the 4 ranks": lambda: simulate_uniform(
        ModelShape(2, 64, 32, 10, 2, 128), CLUSTER
    ),
    # groups of ranks
    "bytes_per_s is None; expected a finite rate above 0 of 2 ranks": lambda: Peers(2),
    "Peers.size is 0; expected at least 1": lambda: Peers(0),
    "latency_s is -1.0; expected a finite number": lambda: Peers(2, 1.0, -1.0),
    "microbatches is 0; expected at least 1": lambda: Parallel(microbatches=0),
    "interleave is 2; expected 1, as one pipeline stage has all layers": lambda: Parallel(interleave=2),
    "pipeline has 3 parts; expected at most": lambda: Parallel(pipeline=Peers(3, 1.0)).share(MODEL, CLUSTER),
    "tensor.size is 3; expected a divisor of inner 32": lambda: Parallel(Peers(3, 1.0)).share(MODEL, CLUSTER),
    # times
    "expected as many": lambda: MeasuredGemm((), ()),
    "rows has 2 points, flops_per_s 1": lambda: MeasuredGemm((1.0, 2.0), (1.0,)),
    "(2.0, 1.0); expected ascending numbers above 0": lambda: MeasuredGemm((2.0, 1.0), (1.0, 1.0)),
    "(0.0, 1.0); expected ascending numbers above 0": lambda: MeasuredGemm((0.0, 1.0), (1.0, 1.0)),
    "expected finite rates above 0": lambda: MeasuredGemm((1.0, 2.0), (1.0, 0.0)),
    "repeats is 0; expected at least 1": lambda: benchmark_seconds(abs, 1, repeats=0),
    # expert domains
    "Work.token_bytes is 0.0; expected a finite number above 0": lambda: work(token_bytes=0.0),
    "Work.expert_bytes is inf; expected a finite": lambda: work(expert_bytes=math.inf),
    "Work.pre_expert_s is -1.0; expected a finite number, at least 0": lambda: work(pre_expert_s=-1.0),
    "Work.backward_s is nan": lambda: work(backward_s=math.nan),
    "Work.backward_exchanges is -1; expected at least 0": lambda: work(backward_exchanges=-1),
    "Level('dc').bytes_per_s is None; expected a finite rate, in bytes per": lambda: choose_expert_domains(
        work(), Topology((Level("dc", 4),), 4)
    ),
    "bytes_per_s is 0.0; expected > 0": lambda: Level("dc", 4, bytes_per_s=0.0),
    # drift
    "steady is": lambda: Drift(steady=0.0),
    "drifting is": lambda: Drift(steady=0.5, drifting=0.6),
    "steps is": lambda: Drift(steps=0.0),
    "rank_std is": lambda: Drift(rank_std=-1.0),
    "increasing": lambda: drifting((1, 0), 1, Drift(), 2.0),
    "drift has no spread": lambda: drifting((0, 1), 1, Drift()),
    "at least 8": lambda: fitted_drift(np.ones((7, 1, 2, 4), np.int32), 1),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused(message):
    with pytest.raises(ValueError, match=re.escape(message)):
        REFUSED[message]()
