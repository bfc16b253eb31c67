"""Parallel groups besides the expert-parallel one, compared with manual calculation."""

from dataclasses import replace

import numpy as np
import pytest

from jax_moe_lb.layer import systems
from jax_moe_lb.sim import AnalyticGemm, Cluster, Links, Migration, ModelShape, Parallel, Peers, Step, simulate
from jax_moe_lb.sim.config import load_config
from jax_moe_lb.sim.memory import memory_of
from jax_moe_lb.sim.run import BUBBLE

MODEL = ModelShape(layers=4, hidden=64, inner=128, experts=8, per_token=2, tokens=256, other_s=0.5)
CLUSTER = Cluster((Links("gpu", 4, 1e9, latency_s=1e-5),), AnalyticGemm(1e10, launch_s=0.0), flops_per_s=1e9)
COUNTS = np.full((4, 8), 64, np.int32)
TWO = Peers(2, 1e6, 1e-3)


def simulated(parallel, backward=True, model=MODEL):
    step = Step(backward=backward, parallel=parallel)
    return simulate(systems.exact(1), parallel.share(model, CLUSTER), CLUSTER, COUNTS, step=step)


def adds_up(report):
    return sum(stage.exposed_s for stage in report.stages.values()) == pytest.approx(report.step_s)


def test_alone_nothing_changes():
    step = Step()
    assert simulated(Parallel()).stages == simulate(systems.exact(1), MODEL, CLUSTER, COUNTS, step=step).stages
    assert Parallel().share(MODEL, CLUSTER) == MODEL


def test_tensor_ranks_compute_a_part_and_sum_twice_in_each_pass():
    alone, report = simulated(Parallel()), simulated(Parallel(tensor=TWO))
    # Two ranks on a ring: half of 256 x 64 x 2 bytes twice, in two hops.
    sum_s = 2 * (256 * 64 * 2 / 2) / 1e6 + 2e-3
    for name, passes in (("tensor sums", 4 * 2), ("tensor sums (backward)", 4 * 2)):
        assert report.stages[name].busy_s == report.stages[name].exposed_s == pytest.approx(passes * sum_s)
    for name in ("attention", "experts", "experts (backward)"):
        assert report.stages[name].busy_s == pytest.approx(alone.stages[name].busy_s / 2)
    assert report.stages["dispatch"] == alone.stages["dispatch"]
    assert report.level_bytes["tensor"] == 4 * 16 * 256 * 64 * 2
    assert report.memory.weights == alone.memory.weights / 2
    assert adds_up(report)


def test_data_groups_sum_gradients_once_beside_the_backward_pass():
    alone, report = simulated(Parallel()), simulated(Parallel(data=Peers(4, 1e6), microbatches=8))
    layer_bytes = 2 * 3 / 4 * 2 * MODEL.expert_gradient_bytes
    summed = report.stages["data sums (backward)"]
    assert summed.busy_s == pytest.approx(4 * layer_bytes / 1e6)
    assert report.level_bytes["data"] == pytest.approx(4 * 4 * layer_bytes)
    # A sum takes slightly longer than the attention hiding it.
    assert 0 < summed.exposed_s < summed.busy_s / 2
    # Eight microbatches, one optimizer.
    microbatches_s = 8 * (alone.step_s - 0.5) + 0.5
    assert microbatches_s < report.step_s < microbatches_s + summed.exposed_s
    assert simulated(Parallel(data=Peers(4, 1e8)), backward=False).level_bytes.keys() == {"gpu"}
    assert adds_up(report)


@pytest.mark.parametrize("interleave", [1, 2])
@pytest.mark.parametrize("backward", [True, False])
def test_a_pipeline_waits_for_its_other_stages(interleave, backward):
    parallel = Parallel(pipeline=TWO, microbatches=6, interleave=interleave)
    report = simulated(parallel, backward)
    one = simulated(parallel.of_one_microbatch, backward, replace(MODEL, layers=2))
    # Activations arrive in each part of the layers, and their gradients.
    arrive_s = (1 + backward) * interleave * (256 * 64 * 2 / 1e6 + 1e-3)
    microbatch_s = one.step_s - 0.5 + arrive_s
    assert report.stages[BUBBLE].exposed_s == pytest.approx(microbatch_s / interleave)
    assert report.step_s == pytest.approx(6 * microbatch_s + microbatch_s / interleave + 0.5)
    assert report.level_bytes["pipeline"] == 4 * 6 * (1 + backward) * interleave * 256 * 64 * 2
    assert adds_up(report)


def test_the_first_stage_keeps_what_it_has_begun():
    parallel = Parallel(pipeline=Peers(4, 1e9), microbatches=16)
    few = replace(parallel, microbatches=2)
    whole, piped, short = (
        memory_of(systems.plain(), p.share(MODEL, CLUSTER), CLUSTER, Migration(), Step(parallel=p))
        for p in (Parallel(), parallel, few)
    )
    assert (piped.weights, piped.optimizer) == (whole.weights / 4, whole.optimizer / 4)
    assert (piped.kept, short.kept) == (whole.kept, whole.kept / 2)


def test_a_stage_may_have_a_layer_more():
    share = Parallel(pipeline=Peers(3, 1e9)).share(MODEL, CLUSTER)
    assert (share.layers, share.inner) == (2, 128)


FILE = """
version: 1
cluster: h100_node
model: mixtral_8x7b
step:
  parallel:
    tensor: {size: 2, rate: 360 GB/s, latency: 3 us}
    pipeline: {size: 4, rate: 50 GB/s, latency: 10 us}
    microbatches: 16
"""


def test_a_file_says_them(tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text(FILE)
    expected = Parallel(Peers(2, 360e9, 3e-6), Peers(), Peers(4, 50e9, 10e-6), 16)
    assert load_config("FILE", str(path)).step.build().parallel == expected
    path.write_text(FILE.replace("size: 2, rate: 360 GB/s", "size: 2"))
    with pytest.raises(ValueError, match=r"step\.parallel\.tensor has no rate; expected one between its 2 ranks"):
        load_config("FILE", str(path))
