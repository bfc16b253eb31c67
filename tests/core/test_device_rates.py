"""Every rate of a device names its basis and source, and files with mistakes are refused."""

import copy
import dataclasses

import pytest

from jax_moe_lb.core import device_rates as rates

GPUS = ("a100", "b200", "gb200", "h100", "h200")


def test_devices_are_listed_and_read():
    assert rates.rated_devices() == sorted((*GPUS, "tpu7x", "v5e", "v5p", "v6e"))
    assert rates.rated_devices("cuda") == sorted(GPUS)
    assert rates.rated_devices("tpu") == ["tpu7x", "v5e", "v5p", "v6e"]
    for kind in rates.rated_devices():
        found = rates.device_rates(kind, "cuda" if kind in GPUS else "tpu")
        assert 0 < found.grouped["outer"] <= found.dense
        assert 0 < found.link_share < 1


def test_a_file_overrides_its_base():
    h100, h200, a100 = (rates.device_rates(kind, "cuda") for kind in ("h100", "h200", "a100"))
    own = rates._files()["h200"]
    inherited = [one.name for one in dataclasses.fields(h100) if one.name not in own]
    assert {name: getattr(h200, name) for name in inherited} == {name: getattr(h100, name) for name in inherited}
    assert "link" in inherited
    assert (a100.network, h100.network) == (25e9, 50e9)
    assert a100.nccl_update == h100.nccl_update


def test_a_device_has_its_own_rates_of_kernels_over_those_of_its_base(monkeypatch):
    files = copy.deepcopy(rates._files())
    own = {"value": {"Hopper": {"product": "700 TFLOP/s"}, "Triton": {"product": "600 TFLOP/s"}}}
    files["h200"]["kernels"] = own | {"basis": "measured", "source": "x"}
    monkeypatch.setattr(rates, "_files", lambda: files)
    tflops = rates.recorded_tflops.__wrapped__
    assert [tflops("9.0", "product", "Hopper", one) for one in ("h200", "h100", None)] == [700.0, None, None]
    assert [tflops("9.0", "product", "Triton", one) for one in ("h200", "h100")] == [600.0, 584.0]
    assert tflops("9.0", "outer", "Triton", "h200") == 564.0


@pytest.fixture
def changed(monkeypatch):
    def change(key, value):
        files = copy.deepcopy(rates._files())
        files["h100"][key] = value
        monkeypatch.setattr(rates, "_files", lambda: files)

    return change


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("link", "450 GB/s", "link is '450 GB/s'; expected value, basis and source"),
        ("link", {"value": "450 GB/s", "basis": "assumed"}, "expected value, basis and source"),
        ("link", {"value": "450 GB/s", "basis": "guessed", "source": "x"}, "link basis is 'guessed'; expected one of"),
        ("link", {"value": "450 GB/s", "basis": "assumed", "source": " "}, "link source is ' '; expected text"),
        ("link", {"value": "450", "basis": "assumed", "source": "x"}, "link is '450'; expected a rate above 0"),
        ("link_share", {"value": 60, "basis": "assumed", "source": "x"}, "link_share is 60; expected a share above 0"),
        ("grouped", {"value": {"product": "1 TFLOP/s"}, "basis": "assumed", "source": "x"}, "expected product, "),
        ("planner_kernel", {"value": {}, "basis": "assumed", "source": "x"}, "expected times by ranks of a domain"),
        ("lnik", {"value": "450 GB/s", "basis": "assumed", "source": "x"}, "lnik "),
    ],
)
def test_mistakes_name_the_file_and_the_key(changed, key, value, message):
    changed(key, value)
    with pytest.raises(ValueError, match=r"^devices/h100.toml: ") as refused:
        rates.device_rates("h100", "cuda")
    assert message in str(refused.value)


def test_an_unknown_device_names_the_known_ones():
    with pytest.raises(ValueError, match=r"^device is 'v4'; expected one with rates: a100, .*, v6e$"):
        rates.device_rates("v4", "tpu")
