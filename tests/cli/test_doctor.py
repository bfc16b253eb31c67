"""The output of `doctor` matches the compiled operations."""

import json
import platform
import re
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import jax_moe_lb
from jax_moe_lb import Experts, Plan, Topology, _ffi
from jax_moe_lb.cli import main
from jax_moe_lb.cli.doctor import (
    HOW_TO_BUILD,
    balancer_implementations,
    build_states,
    grouped_products,
    implementations,
    pure_jax_message,
    version,
)
from jax_moe_lb.cli.planning import balancer_names
from jax_moe_lb.collectives.peer_copy import Route, copy_expert_weights, join
from jax_moe_lb.collectives.plan_and_copy import plan_and_copy, post
from jax_moe_lb.collectives.ragged_all_to_all import Group, Slices, ragged_all_to_all
from jax_moe_lb.core import custom_calls
from jax_moe_lb.kernels import backends as grouped_kernels
from jax_moe_lb.kernels.grouped_ffn import grouped_ffn
from jax_moe_lb.planners.base import kernel_check
from jax_moe_lb.planners.greedy import greedy_planner
from jax_moe_lb.planners.relay import relay
from jax_moe_lb.transport import Gather
from tests.layer_cases import make_mesh
from tests.marks import parametrize

PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
RANKS = 8
OPERATIONS = ("relay", "ragged_all_to_all", "grouped_ffn", "gather", "copy_expert_weights", "plan_and_copy")


def floats(*shape):
    return jnp.zeros(shape, jnp.float32)


def integers(*shape):
    return jnp.zeros(shape, jnp.int32)


def sharded(function, num_replicated):
    by_rank = PartitionSpec("expert")
    in_specs = (by_rank, *[PartitionSpec()] * num_replicated)
    return jax.shard_map(function, mesh=make_mesh((RANKS,), ("expert",)), in_specs=in_specs, out_specs=by_rank)


def exchange(rows, offsets):
    return ragged_all_to_all(rows, rows, Slices(offsets, offsets, offsets, offsets), Group(("expert",)))


def gather(experts, placement):
    topology = Topology(Topology.flat(RANKS).levels, RANKS, expert_axes=("expert",))
    return Gather()(experts, Plan(placement, jnp.zeros((2 * RANKS, RANKS), jnp.int32), domain=RANKS), topology)


def copy(experts, wanted):
    return copy_expert_weights(experts, wanted, route=Route(("expert",)))


def planned_copy(experts, placement, quota):
    planner = greedy_planner(RANKS, 1)
    _, posted = post(placement, quota, experts, (), planner=planner, route=Route(("expert",)))
    return join(plan_and_copy(posted, ())[2])


def experts(num_experts):
    return Experts(floats(num_experts, 4, 8), floats(num_experts, 8, 4))


def operation(name):
    """Return a function running the operation, and its arguments."""
    placement, full_quota = integers(RANKS, 4), integers(2 * RANKS, RANKS)
    return {
        "relay": (lambda placement: relay(placement, 2, 4, 8, 2), (placement,)),
        "ragged_all_to_all": (sharded(exchange, 1), (floats(8 * RANKS, 4), integers(RANKS))),
        "grouped_ffn": (lambda *args: grouped_ffn(*args), (floats(32, 4), experts(2), integers(2))),
        "gather": (sharded(gather, 1), (experts(2 * RANKS), placement)),
        "copy_expert_weights": (sharded(copy, 1), (experts(2 * RANKS), placement)),
        "plan_and_copy": (sharded(planned_copy, 2), (experts(2 * RANKS), placement, full_quota)),
    }[name]


@pytest.mark.slow
def test_json_and_tables_have_the_same(capsys, monkeypatch):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    keys = ("versions", "build", "compilers", "pure_jax", "shadowed", "backend", "devices", "compiler_options")
    assert list(found) == [*keys, "exchange", "balancers", "ops", "grouped_products"]
    assert list(found["versions"]) == ["python", "jax_moe_lb", "jax", "jaxlib", "flax", "numpy"]
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["jax"] == version("jax")
    assert (found["backend"], len(found["devices"])) == ("cpu", 8)
    assert [op["op"] for op in found["ops"]] == list(OPERATIONS)
    assert all(list(op) == ["op", "implementation", "why", "faster"] for op in found["ops"])
    assert [balancer["op"] for balancer in found["balancers"]] == balancer_names()
    assert (found["pure_jax"], found["shadowed"]) == (None, None)
    assert found["exchange"] == {"path": "custom call in one process", "why": "all ranks are devices of one process"}
    assert found["grouped_products"] == grouped_products()
    monkeypatch.setattr("jax_moe_lb.cli.app.diagnosis", lambda: found)
    assert main(["doctor"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    words = (*OPERATIONS, "grouped products of bfloat16", "lax.ragged_dot", version("jaxlib"), "jax_moe_lb._planning")
    assert not [word for word in words if word not in captured.out]


@pytest.mark.slow
@parametrize("backend", ["gpu"], PLATFORMS)
def test_planners_of_balancers_are_named(backend):
    # A build without a CUDA toolkit has no custom calls of GPUs.
    has_calls = backend == "cpu" or (backend == "gpu" and find_spec("jax_moe_lb._ffi_cuda") is not None)
    found = {op.op: op for op in balancer_implementations(backend)}
    assert list(found) == balancer_names()
    assert found["greedy"].implementation == ("custom call moe_lb_plan_greedy" if has_calls else "a loop in jnp")
    assert found["lplb"].implementation == "a callback on the host"
    assert found["hybridep"].implementation == "no planner"
    names = {name for name, op in found.items() if op.implementation.startswith("custom call")}
    all_native = {"eplb", "eplb_plus", "exact", "fastermoe", "feplb", "greedy", "rails", "ultraep"}
    assert names == (all_native if has_calls else set())


@pytest.mark.slow
@pytest.mark.parametrize("built", [True, False], ids=["built", "not built"])
@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("backend", PLATFORMS)
def test_implementation_is_the_one_compiled(monkeypatch, request, backend, op, built):
    monkeypatch.setattr(grouped_kernels, "has_tokamax", lambda: False)
    if not built:
        request.getfixturevalue("no_custom_calls")
    function, arguments = operation(op)
    (said,) = [found.implementation for found in implementations(backend) if found.op == op]
    lowered = lower(function, arguments, backend)
    for native in ("ragged_all_to_all", "ragged_dot"):
        assert (native in lowered) == (f"lax.{native}" == said)
    assert said in {f"custom call {target}" for target in called(lowered)} or not called(lowered)
    assert said.startswith("custom call") == bool(called(lowered))


def lower(function, arguments, backend):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=(PLATFORMS[backend],)).as_text()


def called(lowered):
    return set(re.findall(r"moe_lb_\w+", lowered))


@pytest.mark.slow
def test_without_custom_calls_it_says_how_to_get_them(no_custom_calls):
    for state in (build_states()["jax_moe_lb._absent_cpu"], build_states()["jax_moe_lb._absent_cuda"]):
        assert state.startswith("missing")
        assert "pip install ." in state
    assert {op.op: op.faster for op in implementations("cpu")}["ragged_all_to_all"] == HOW_TO_BUILD["cpu"]
    found = {op.op: op for op in balancer_implementations("cpu")}
    assert (found["greedy"].implementation, found["greedy"].faster) == ("a loop in jnp", HOW_TO_BUILD["cpu"])
    assert (found["plain"].implementation, found["plain"].faster) == ("no planner", None)
    assert {op.op: op.faster for op in balancer_implementations("gpu")}["greedy"] == HOW_TO_BUILD["cuda"]


@pytest.fixture
def cuda_module(monkeypatch, request):
    """Install a CUDA module without checks of the driver, under a name no cached check has met."""
    module = ModuleType(f"jax_moe_lb._{request.node.name}")
    module.__spec__ = ModuleSpec(module.__name__, None)
    module.registrations = _ffi.registrations
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(custom_calls.MODULES, "cuda", module.__name__)
    return module


@pytest.mark.slow
def test_custom_calls_that_the_driver_cannot_run_are_not_used(cuda_module):
    cuda_module.why_unusable = lambda: "the driver here is for CUDA 12.4"
    assert not custom_calls.is_built("cuda")
    assert build_states()[cuda_module.__name__].endswith("not used: the driver here is for CUDA 12.4")
    greedy = {op.op: op for op in balancer_implementations("gpu")}["greedy"]
    assert not greedy.implementation.startswith("custom call")


def test_what_the_driver_lacks_is_named(cuda_module):
    cuda_module.why_unusable = cuda_module.why_not_between_processes = lambda: None
    cuda_module.why_not_batched = lambda: "the driver here has no cuMemcpyBatchAsync"
    cuda_module.driver_version = lambda: "CUDA 12.4"
    assert custom_calls.is_built("cuda")
    lacks = ", driver for CUDA 12.4; the driver here has no cuMemcpyBatchAsync"
    assert build_states()[cuda_module.__name__].endswith(lacks)


def test_kernels_that_the_driver_cannot_run_are_named_and_not_used(cuda_module):
    cuda_module.exact_kernel_fits = lambda *sizes: True
    cuda_module.why_no_kernels = lambda: None
    assert kernel_check("exact_kernel_fits") is cuda_module.exact_kernel_fits
    cuda_module.why_no_kernels = lambda: "planners run on the host"
    assert kernel_check("exact_kernel_fits") is None
    assert build_states()[cuda_module.__name__].endswith("; planners run on the host")


def test_a_build_against_newer_headers_is_named_and_refused_before_xla_sees_it(monkeypatch):
    assert "run pip install . in a checkout" not in build_states()["jax_moe_lb._ffi"]
    assert _ffi.registrations()["api_version"] <= custom_calls.newest_api_version()
    monkeypatch.setattr("jax_moe_lb.core.custom_calls.newest_api_version", lambda: (0, 1))
    assert build_states()["jax_moe_lb._ffi"].endswith(" accepts at most 0.1; run pip install . in a checkout")
    with pytest.raises(ImportError, match=r"_ffi was built for XLA FFI 0\.\d+; jaxlib .* accepts at most 0\.1; run"):
        custom_calls.register.__wrapped__()


def test_a_module_that_cannot_be_loaded_is_named(monkeypatch, tmp_path):
    (tmp_path / "broken_ffi.py").write_text("raise ImportError('no libstdc++')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(custom_calls.MODULES, "cpu", "broken_ffi")
    assert build_states()["broken_ffi"] == "cannot be loaded: no libstdc++"


def install_tokamax(monkeypatch, missing=()):
    """Install a fake tokamax without the kernels of some dimension numbers."""

    def ragged_dot_general(left, right, *, group_sizes, ragged_dot_dimension_numbers, **options):
        if ragged_dot_dimension_numbers in missing:
            raise NotImplementedError("no kernel")
        assert options.pop("implementation") == "mosaic_gpu"
        product = jax.lax.ragged_dot_general(left, right, group_sizes, ragged_dot_dimension_numbers, **options)
        return jnp.tanh(product)

    module = ModuleType("tokamax")
    module.__spec__ = ModuleSpec(module.__name__, None)
    module.ragged_dot_general = ragged_dot_general
    monkeypatch.setitem(sys.modules, "tokamax", module)


def test_tokamax(monkeypatch):
    def on_gpu():
        return next(found for found in implementations("gpu") if found.op == "grouped_ffn")

    monkeypatch.setattr(grouped_kernels, "has_tokamax", lambda: False)
    assert on_gpu().implementation == "blocks of rows"
    assert on_gpu().faster == "run pip install tokamax"
    monkeypatch.undo()
    install_tokamax(monkeypatch)
    assert on_gpu().implementation == "tokamax.ragged_dot"
    assert on_gpu().faster is None
    install_tokamax(monkeypatch, grouped_kernels.DIMENSIONS.values())
    assert on_gpu().implementation == "blocks of rows"
    assert "not tokamax.ragged_dot (no such kernel for the default device, cpu)" in on_gpu().why
    assert on_gpu().faster is None


TOKAMAX, TRITON, BLOCKS = "tokamax.ragged_dot", "Triton kernel", "blocks of rows"


@pytest.mark.parametrize(
    ("missing", "compute_capability", "in_one_array", "in_parts"),
    [
        # The other kernels were recorded at lower rates.
        ((), "9.0", (TRITON,) * 3, (TRITON,) * 3),
        # The transposed product of a transposed copy.
        (("transposed", "outer"), "10.0", (TOKAMAX, TOKAMAX, TRITON), (TOKAMAX, TOKAMAX, TRITON)),
        (("product", "transposed", "outer"), "8.0", (TRITON,) * 3, (TRITON,) * 3),
        (("product", "transposed", "outer"), None, (BLOCKS,) * 3, (BLOCKS,) * 3),
    ],
    ids=["Hopper", "Blackwell", "Ampere", "no GPU"],
)
def test_grouped_products_of_gpus(missing, compute_capability, in_one_array, in_parts, monkeypatch):
    install_tokamax(monkeypatch, [grouped_kernels.DIMENSIONS[kind] for kind in missing])
    if compute_capability is not None:
        device = SimpleNamespace(platform="gpu", compute_capability=compute_capability)
        monkeypatch.setattr(grouped_kernels, "get_default_device", lambda: device)
    for weights, want in (("in one array", in_one_array), ("in parts", in_parts)):
        rows = [row for row in grouped_products() if (row["platform"], row["weights"]) == ("cuda", weights)]
        assert tuple(row["product"] for row in rows) == grouped_kernels.KINDS
        assert tuple(row["backend"] for row in rows) == want
        for row in rows:
            names = [backend.name for backend in grouped_kernels.BACKENDS if backend.platform in ("cuda", None)]
            assert all(f"; not {name} (" in row["why"] for name in names[: names.index(row["backend"])])


@pytest.mark.parametrize("built", [True, False], ids=["built", "not built"])
def test_grouped_products_of_other_platforms(built, request):
    if not built:
        request.getfixturevalue("no_custom_calls")
    found = {(row["platform"], row["product"]): row["backend"] for row in grouped_products()}
    for kind in grouped_kernels.KINDS:
        assert found["cpu", kind] == ("custom call" if built else BLOCKS)
        assert found["tpu", kind] == "lax.ragged_dot"


@pytest.mark.parametrize("metadata_version", [None, "0.0.1"], ids=["incomplete metadata", "another installation"])
def test_the_version_is_that_of_the_code(capsys, monkeypatch, metadata_version):
    monkeypatch.setattr("importlib.metadata.version", lambda package: metadata_version)
    assert version("jax_moe_lb") == jax_moe_lb.__version__
    assert version("jax") == (metadata_version or "unknown")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == jax_moe_lb.__version__ + "\n"


@pytest.mark.parametrize("compiler", [True, False])
def test_pure_jax_names_the_missing_tools(monkeypatch, compiler):
    assert pure_jax_message() is None
    monkeypatch.setattr(custom_calls, "is_pure_jax", lambda: True)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/c++" if compiler else None)
    message = pure_jax_message()
    assert message.startswith("pure JAX, without extension modules; for faster planners ")
    assert message.endswith("run pip install . in a checkout")
    assert ("install a C++17 compiler (Debian, Ubuntu: apt install g++), then run" in message) != compiler
