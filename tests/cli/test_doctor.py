"""`doctor`, and whether it tells the truth: what it says is compared with what the operations compile to."""

import json
import platform

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from jax_moe_lb import Experts, Gather, Plan, Topology
from jax_moe_lb.cli import main
from jax_moe_lb.cli.doctor import implementations, version
from jax_moe_lb.ops import grouped_ffn as grouped_ffn_module
from jax_moe_lb.ops.grouped_ffn import grouped_ffn
from jax_moe_lb.ops.ragged_all_to_all import ragged_all_to_all

PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
RANKS = 8
OPERATIONS = ("ragged_all_to_all", "grouped_ffn", "gather")


def floats(*shape):
    return jnp.zeros(shape, jnp.float32)


def integers(*shape):
    return jnp.zeros(shape, jnp.int32)


def sharded(function, num_replicated):
    mesh = jax.make_mesh((RANKS,), ("expert",), axis_types=(AxisType.Auto,))
    by_rank = PartitionSpec("expert")
    return jax.shard_map(
        function, mesh=mesh, in_specs=(by_rank, *[PartitionSpec()] * num_replicated), out_specs=by_rank
    )


def exchange(rows, offsets):
    return ragged_all_to_all(rows, rows, offsets, offsets, offsets, offsets, axis_name=("expert",))


def gather(experts, placement):
    topology = Topology(Topology.flat(RANKS).levels, RANKS, expert_axes=("expert",))
    return Gather()(experts, Plan(placement, jnp.zeros((2 * RANKS, RANKS), jnp.int32), domain=RANKS), topology)


def experts(num_experts):
    return Experts(floats(num_experts, 4, 8), floats(num_experts, 8, 4))


def operation(name):
    """A function that runs it, and arguments."""
    if name == "grouped_ffn":
        return grouped_ffn, (floats(32, 4), experts(2), integers(2))
    if name == "gather":
        return sharded(gather, 1), (experts(2 * RANKS), integers(RANKS, 4))
    return sharded(exchange, 1), (floats(8 * RANKS, 4), integers(RANKS))


def as_json(capsys):
    assert main(["doctor", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def test_json(capsys):
    found = as_json(capsys)
    assert list(found) == ["versions", "backend", "devices", "ops"]
    assert list(found["versions"]) == ["python", "jax_moe_lb", "jax", "jaxlib", "flax", "numpy"]
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["jax"] == version("jax")
    assert (found["backend"], len(found["devices"])) == ("cpu", 8)
    assert [op["op"] for op in found["ops"]] == list(OPERATIONS)
    for op in found["ops"]:
        assert list(op) == ["op", "implementation", "why", "faster"]
        assert "jax[cuda13]" in op["faster"]


def test_tables(capsys):
    assert main(["doctor"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    for word in (*OPERATIONS, "jaxlib", version("jaxlib"), "'jax[cuda13]'"):
        assert word in captured.out


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("backend", PLATFORMS)
def test_implementation_is_the_one_compiled(monkeypatch, backend, op):
    monkeypatch.setattr(grouped_ffn_module, "has_tokamax", lambda: False)
    function, arguments = operation(op)
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=(PLATFORMS[backend],)).as_text()
    (said,) = [found.implementation for found in implementations(backend) if found.op == op]
    for native in ("ragged_all_to_all", "ragged_dot"):
        assert (native in lowered) == (f"lax.{native}" == said)


def test_tokamax(monkeypatch):
    asked = "jax_moe_lb.cli.doctor.has_tokamax"
    monkeypatch.setattr(asked, lambda: True)
    assert implementations("gpu")[1].implementation == "tokamax.ragged_dot"
    monkeypatch.setattr(asked, lambda: False)
    assert implementations("gpu")[1].faster == "pip install tokamax"


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == version("jax_moe_lb") + "\n"
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in ("plan", "replay", "doctor"))
    assert main(["plan", "--help"]) == 0
    assert "[R, E] or [layers, R, E]" in capsys.readouterr().out
