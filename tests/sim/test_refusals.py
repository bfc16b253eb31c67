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
    mean_report,
    simulate,
    simulate_uniform,
    skewed_counts,
)

GPU, NODE = Links("gpu", 4, 1e9), Links("node", 4, 1e9)
CLUSTER, MODEL = Cluster((GPU,)), ModelShape(2, 64, 32, 16, 2, 128)
link = partial(Links, name="gpu", size=2, bytes_per_s=1.0)
work = partial(Work, token_bytes=1.0, expert_bytes=1.0, pre_expert_s=0.0)
simulated = partial(simulate, systems.plain(), MODEL, CLUSTER)
WITHOUT_RATE, TEN_EXPERTS = Topology((Level("dc", 4),), 4), ModelShape(2, 64, 32, 10, 2, 128)


def uniform(model=MODEL, **options):
    return simulate_uniform(model, CLUSTER, **options)


drifting = partial(drifting_counts, MODEL, 8)
fitted = partial(fitted_drift, per_token=1)
skewed = partial(skewed_counts, MODEL, num_ranks=4, imbalance=1.5, layers=1)
TRACE = np.ones((8, 1, 2, 4), np.int32)

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
    "domain_sizes is (3,); expected a divisor of each of the levels' sizes": lambda: uniform(migration=Migration((3,))),
    "model has 10 experts; expected a positive multiple of the 4 ranks": lambda: uniform(TEN_EXPERTS),
    # groups of ranks
    "bytes_per_s is None; expected a finite rate above 0 of 2 ranks": lambda: Peers(2),
    "Peers.size is 0; expected at least 1": lambda: Peers(0),
    "latency_s is -1.0; expected a finite number": lambda: Peers(2, 1.0, -1.0),
    "microbatches is 0; expected at least 1": lambda: Parallel(microbatches=0),
    "interleave is 2; expected 1, as one pipeline stage has all layers": lambda: Parallel(interleave=2),
    "pipeline has 3 parts; expected at most": lambda: Parallel(pipeline=Peers(3, 1.0)).share(MODEL, CLUSTER),
    "tensor.size is 3; expected a divisor of inner 32": lambda: Parallel(Peers(3, 1.0)).share(MODEL, CLUSTER),
    # times
    "rows has 0 points, flops_per_s 0; expected as many, at least one": lambda: MeasuredGemm((), ()),
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
        work(), WITHOUT_RATE
    ),
    "Level.bytes_per_s is 0.0; expected a finite number above 0": lambda: Level("dc", 4, bytes_per_s=0.0),
    # drift
    "steady is": lambda: Drift(steady=0.0),
    "drifting is": lambda: Drift(steady=0.5, drifting=0.6),
    "steps is": lambda: Drift(steps=0.0),
    "rank_std is": lambda: Drift(rank_std=-1.0),
    "increasing": lambda: drifting((1, 0), 1, Drift(), 2.0),
    "drift has no spread": lambda: drifting((0, 1), 1, Drift()),
    "at least 8": lambda: fitted(TRACE[:7]),
    "trace has shape (8, 2, 4)": lambda: fitted(TRACE[:, 0]),
    "dtype float64": lambda: fitted(TRACE / 2),
    "minimum -1; expected counts [steps, layers, R, E], integers of at least 0": lambda: fitted(-TRACE),
    "per_token is 0; expected at least 1": lambda: fitted(TRACE, per_token=0),
    "per_token is 5; expected at most the 4 experts": lambda: fitted(TRACE, per_token=5),
    # loads
    "imbalance is 0.5; expected a finite number, at least 1": lambda: skewed(imbalance=0.5),
    "imbalance is nan; expected a finite number": lambda: skewed(imbalance=math.nan),
    "layers is 0; expected at least 1": lambda: skewed(layers=0),
    "num_ranks is 0; expected at least 1": lambda: skewed(num_ranks=0),
    "seed is -1; expected at least 0": lambda: skewed(seed=-1),
    # steps
    "gradient_itemsize is 3; expected one of 1, 2, 4": lambda: ModelShape(2, 64, 32, 16, 2, 128, gradient_itemsize=3),
    "ModelShape.sequence is -1; expected at least 1": lambda: ModelShape(2, 64, 32, 16, 2, 128, sequence=-1),
    "reports is empty; expected at least one report": lambda: mean_report([]),
    "states has 2 layers; expected the 1 of counts": lambda: simulated(np.ones((4, 16), int), states=[[()], [()]]),
    "dispatch is TwoPhase; expected one without a second phase": lambda: uniform(dispatch=systems.feplb().dispatch),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused(message, unchecked):
    with pytest.raises(ValueError, match=re.escape(message)):
        REFUSED[message]()


def test_a_load_shape_in_words_is_refused(unchecked):
    # The words of one hot expert per rank would otherwise give another shape.
    with pytest.raises(TypeError, match="shape is 'one hot expert per rank'; expected a value of LoadShape"):
        skewed(shape="one hot expert per rank")
