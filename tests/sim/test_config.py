"""Files and presets are built as written, and unknown entries are reported."""

import copy
from pathlib import Path

import pytest
import yaml

from jax_moe_lb.core import quantities as units
from jax_moe_lb.sim import AnalyticGemm, Collective, Communication, MeasuredGemm, ModelShape
from jax_moe_lb.sim.config import load_config, preset_names

BASE = {
    "version": 1,
    "cluster": {
        "levels": [
            {"name": "node", "size": 2, "rate": "400 Gbit/s", "links": 4, "latency": "5 us"},
            {"name": "gpu", "size": 4, "rate": "360 GB/s"},
        ],
        "gemm": {"peak": "600 TFLOP/s", "half_rows": 300, "launch": "10 us"},
        "compute": "400 TFLOP/s",
    },
    "model": {"layers": 2, "hidden": 64, "inner": 32, "experts": 16, "per_token": 2, "tokens": 128},
}
LEVEL = ("cluster", "levels", 0)
CLUSTER, MODEL = ("cluster",), ("model",)


@pytest.fixture
def written(tmp_path):
    def write(path=(), remove=None, **change):
        data = copy.deepcopy(BASE)
        place = data
        for key in path:
            place = place[key]
        place.update(change)
        place.pop(remove, None)
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(data))
        return str(tmp_path / "config.yaml")

    return write


@pytest.mark.parametrize(("text", "value"), [("1e-1", 0.1), ("2E-1", 0.2), ("1.e-1", 0.1), ("5e-01", 0.5)])
def test_an_exponent_needs_no_point(written, text, value):
    """YAML 1.1 takes such plain text for no number; quoted text is none."""
    path = Path(written(CLUSTER, jitter=0.0))
    path.write_text(path.read_text().replace("jitter: 0.0", f"jitter: {text}"))
    assert load_config("CONFIG", str(path)).cluster.build().jitter == value
    path.write_text(path.read_text().replace(f"jitter: {text}", f"jitter: '{text}'"))
    with pytest.raises(ValueError, match=f"cluster.jitter is '{text}'"):
        load_config("CONFIG", str(path))


def test_a_file_says_what_is_built(written):
    config = load_config("CONFIG", written())
    cluster, model = config.cluster.build(), config.model.build()
    levels = [(level.name, level.bytes_per_s, level.links, level.latency_s) for level in cluster.levels]
    assert levels == [("node", 50e9, 4, 5e-6), ("gpu", 360e9, 1, 0.0)]
    assert cluster.gemm == AnalyticGemm(600e12, 300.0, 10e-6)
    assert model == ModelShape(2, 64, 32, 16, 2, 128)
    topology = cluster.topology()
    assert (topology.num_ranks, topology.ranks_per_domain, topology.rails_per_node) == (8, 4, 4)
    curve = load_config("CONFIG", written(CLUSTER, gemm={"rows": [1, 2], "speeds": ["1 GFLOP/s", "2 GFLOP/s"]}))
    assert curve.cluster.build().gemm == MeasuredGemm((1.0, 2.0), (1e9, 2e9))


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (units.rate, "400 Gbit/s", 50e9),
        (units.rate, "400 GB/s", 400e9),
        (units.rate, "1.5GiB/s", 1.5 * 2**30),
        (units.rate, "8 bit/s", 1.0),
        (units.time, "5 us", 5e-6),
        (units.time, "0 s", 0.0),
        (units.speed, "2.5e3 GFLOP/s", 2.5e12),
        (units.size, "80 GB", 80e9),
    ],
)
def test_units(read, text, value):
    assert read(text) == pytest.approx(value)


NO_RATES = ["400", "400 Gbps", "400 GB", "400 gbit/s", "0 GB/s", "-1 GB/s", "GB/s", "e GB/s"]


@pytest.mark.parametrize("value", [400, 400.0, None, *NO_RATES])
def test_a_rate_needs_its_unit(value):
    with pytest.raises(ValueError, match=r"expected a rate above 0 with its unit, such as '400 Gbit/s' or '50 GB/s'"):
        units.rate(value)


BAD = [
    ((), {"version": 2}, "version is 2; expected 1"),
    ((), {"remove": "version"}, "version is missing; expected the key version: 1"),
    ((), {"clutser": 1}, "clutser is unknown"),
    (LEVEL, {"siz": 3}, "cluster.levels[0].siz is unknown"),
    ((), {"routing": {"drift": {"stedy": 1}}}, "routing.drift.stedy is unknown"),
    ((), {"routing": {"drift": {"steady": -1}}}, "routing.drift steady is -1.0; expected a share"),
    (LEVEL, {"rate": 400}, "cluster.levels[0].rate is 400; expected a rate above 0 with its unit"),
    (LEVEL, {"latency": 5}, "cluster.levels[0].latency is 5; expected a time with its unit"),
    (LEVEL, {"size": "two"}, "cluster.levels[0].size is 'two'"),
    (LEVEL, {"size": 0}, "cluster.levels[0].size is 0"),
    (LEVEL, {"name": "rack"}, "cluster.levels[0].name is 'rack'"),
    (LEVEL, {"remove": "rate"}, "level node has no rate; expected one, or a device"),
    (CLUSTER, {"remove": "gemm"}, "gemm is missing; expected one, or a device with measured experts"),
    (CLUSTER, {"device": "h100", "levels": [{"name": "dc", "size": 2}]}, "level dc has no rate; expected one"),
    (CLUSTER, {"device": "b200", "gemm": None}, "gemm is missing; expected one, or"),
    (CLUSTER, {"gemm": {"rows": [1]}}, "gemm has neither one"),
    (
        CLUSTER,
        {"gemm": {"rows": [1], "speeds": ["1 TFLOP/s"], "half_rows": 2}},
        "gemm has neither one alone; expected rows and speeds, or peak and half_rows",
    ),
    (CLUSTER, {"jitter": True}, "cluster.jitter is True"),
    ((), {"routing": {"seed": True}}, "routing.seed is True"),
    ((), {"routing": {"imbalance": "2"}}, "routing.imbalance is '2'"),
    ((), {"routing": {"drift": {"steady": True}}}, "routing.drift steady is True; expected a number"),
    ((), {"routing": {"drift": {"steady": "0.5"}}}, "routing.drift steady is '0.5'; expected a number"),
    (CLUSTER, {"communication": {"dispatch_bytes": True}}, "communication dispatch_bytes is True; expected a number"),
    (CLUSTER, {"device": "v100"}, "device is 'v100'; expected a GPU with rates: a100, "),
    (CLUSTER, {"device": "v5e"}, "device is 'v5e'; expected a GPU with rates: a100, "),
    (CLUSTER, {"communication": {"collectives": "rings"}}, "communication.collectives is 'rings'"),
    (
        (),
        {"step": {"parallel": {"pipeline": {"size": 4}}}},
        "step.parallel.pipeline has no rate; expected one between its 4 ranks, such as 50 GB/s",
    ),
    (MODEL, {"layers": 0}, "model.layers is 0"),
    (MODEL, {"per_token": 17}, "per_token is 17; expected at most the 16 experts"),
    (MODEL, {"itemsize": 3}, "itemsize is 3; expected one of 1, 2, 4"),
    ((), {"model": "mixtral"}, "model is 'mixtral', no preset and no .yaml file; near ones are mixtral"),
    ((), {"cluster": "mixtral_8x7b"}, "cluster is 'mixtral_8x7b'; expected a preset with a cluster"),
    ((), {"migration": {"base": "mean"}}, "migration.base is 'mean'"),
    ((), {"routing": {"imbalance": 0.5}}, "routing.imbalance is 0.5"),
]


@pytest.mark.parametrize(("path", "change", "message"), BAD, ids=[message for *_, message in BAD])
def test_what_is_not_understood_is_named(written, path, change, message):
    source = written(path, **change)
    with pytest.raises(ValueError) as error:
        load_config("CONFIG", source)
    assert str(error.value).startswith(f"CONFIG {source}: ")
    assert message in str(error.value)


def test_every_preset_can_be_read():
    assert {"h100_node", "cpu_2_cores", "nvl72", "h100_16_nodes", "dc4_10gbit", "mixtral_8x7b"} <= set(preset_names())
    assert "qwen3_235b" in set(preset_names("model")) - set(preset_names("cluster"))
    for name in preset_names():
        config = load_config("CONFIG", name)
        assert config.model.build().layers > 0
    assert load_config("CONFIG", "nvl72").cluster.build().num_ranks == 64
    assert load_config("CONFIG", "dc4_10gbit").cluster.build().levels[0].bytes_per_s == 1.25e9


def test_a_preset_that_does_not_exist_lists_near_ones():
    near = "h100_node, h100_16_nodes, h200_16_nodes"
    with pytest.raises(ValueError, match=f"CONFIG is 'h100_nod', no preset .*; near ones are {near}, presets"):
        load_config("CONFIG", "h100_nod")


def test_a_key_given_twice_is_refused(tmp_path):
    (tmp_path / "x.yaml").write_text("version: 1\nrouting: {imbalance: 2.0, seed: 1, seed: 2}\n")
    with pytest.raises(ValueError, match=r"x.yaml is not valid YAML: line 2, the key seed is given twice$"):
        load_config("CONFIG", str(tmp_path / "x.yaml"))


@pytest.mark.parametrize("content", [b"", b"- 1", b"version: [", b"\xff\xfe"])
def test_no_yaml(tmp_path, content):
    (tmp_path / "x.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=r"CONFIG .*x.yaml"):
        load_config("CONFIG", str(tmp_path / "x.yaml"))


def test_a_file_says_how_bytes_are_moved_and_how_much_ranks_differ(written):
    told = {"collectives": "tree", "dispatch_bytes": 1.03, "combine_bytes": 2}
    cluster = load_config("CONFIG", written(CLUSTER, communication=told, jitter=0.02, jitter_seed=7)).cluster.build()
    assert cluster.communication == Communication(Collective.TREE, False, 1.03, 2.0)
    assert (cluster.jitter, cluster.jitter_seed) == (0.02, 7)


def test_a_model_may_have_experts_that_all_tokens_pass(written):
    assert load_config("CONFIG", written(MODEL, shared_inner=96)).model.build().shared_flops == 2 * 3 * 64 * 96
    assert load_config("--model", "deepseek_v3").model.build().shared_inner == 2048


def test_a_device_gives_missing_rates_of_copies_and_planner(written):
    own = load_config("CONFIG", written(CLUSTER, device="h100", planner="5 us")).cluster.build()
    assert (own.copy_bytes_per_s, own.planner_s) == (330e9, 5e-6)
    node = load_config("CONFIG", "h100_node", "cluster").cluster.build()
    # Without a constant, each planner takes its own time.
    assert (node.copy_bytes_per_s, node.planner_s, node.host_wait_s) == (330e9, None, 20e-6)
    plain = load_config("CONFIG", written()).cluster.build()
    assert (plain.copy_bytes_per_s, plain.planner_s) == (None, None)
