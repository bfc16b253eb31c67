"""Command `doctor`: installed modules, and the implementation per balancer and operation."""

import importlib
import importlib.util
import platform
import re
import shutil
import sysconfig
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

import jax_moe_lb
from jax_moe_lb.aot.compiler_options import compiler_options
from jax_moe_lb.aot.targets import EXTRAS, has_compiler, how_to_install
from jax_moe_lb.cli.planning import balancer_names, load_balancer
from jax_moe_lb.collectives.exchange_paths import exchange_path
from jax_moe_lb.core import custom_calls as _custom_calls
from jax_moe_lb.core.plan import Plan, plain_plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, State
from jax_moe_lb.kernels.backends import KINDS, NOT_INSTALLED, PLATFORMS, BackendChoice, Kind, Product, choose_backend
from jax_moe_lb.sim.planner_times import needs_counts

IN_A_CHECKOUT = "with a C++17 compiler, run pip install . in a checkout"
HOW_TO_BUILD = {
    "cpu": IN_A_CHECKOUT,
    "cuda": "with a C++17 compiler and the CUDA toolkit, in a checkout run pip install . "
    "-C cmake.define.JAX_MOE_LB_CUDA=ON",
}
"""Remedies for missing custom calls, by platform."""

COMPILERS = ("c++", "g++", "clang++", "CC", "icpx", "xlC")
"""C++ compilers searched on the path, as in CMakeLists.txt."""


def pure_jax_message() -> str | None:
    """Return the missing build tools and the remedy of an installation without extension modules, else `None`."""
    if not _custom_calls.is_pure_jax() or shadowed_install_message() is not None:
        return None
    tools = []
    if not any(map(shutil.which, COMPILERS)):
        tools.append("a C++17 compiler (Debian, Ubuntu: apt install g++)")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        tools.append("the Python headers (Debian, Ubuntu: apt install python3-dev)")
    first = f"install {' and '.join(tools)}, then " if tools else ""
    return f"pure JAX, without extension modules; for faster planners {first}run pip install . in a checkout"


def build_states() -> dict[str, str]:
    """Return the state per extension module as text, by module name."""
    modules = {_custom_calls.MODULES[platform]: how for platform, how in HOW_TO_BUILD.items()} | {
        _custom_calls.PLANNING_MODULE: IN_A_CHECKOUT
    }
    return {module: _state(module, how) for module, how in modules.items()}


def _state(module: str, how_to_build: str) -> str:
    # Distinguish an absent module from a module with a load error.
    if importlib.util.find_spec(module) is None:
        return f"missing; {how_to_build}"
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        return f"cannot be loaded: {error}"
    if module == _custom_calls.PLANNING_MODULE:
        return "built"
    state, reason = _registrations_state(loaded), _custom_calls.why_unusable(module)
    if reason is not None:
        return f"{state}; not used: {reason}"
    return "; ".join([state, *_lacks(loaded)])


DRIVER_CHECKS = ("why_no_kernels", "why_not_batched", "why_not_between_processes", "why_no_peer_access")
"""Functions of the CUDA module that return the reason of a missing feature."""


def _lacks(module: ModuleType) -> list[str]:
    # Optional features of the driver; the module works without them.
    checks = (getattr(module, name, None) for name in DRIVER_CHECKS)
    return [reason for check in checks if check is not None and (reason := check()) is not None]


def _registrations_state(module: ModuleType) -> str:
    registrations = module.registrations()
    built = registrations["api_version"]
    state = f"built, {len(registrations['handlers'])} custom calls, XLA FFI {'.'.join(map(str, built))}"
    driver = getattr(module, "driver_version", str)()
    state += f", driver for {driver}" * bool(driver)
    refused = _custom_calls.why_refused(built)
    return state if refused is None else f"{state}; {refused}"


PACKAGES = ("jax_moe_lb", "jax", "jaxlib", "flax", "numpy")
LOWERING_PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
"""Lowering platforms, by JAX's name of the backend."""
HOW_TO_MULTIPLY = {"custom call": HOW_TO_BUILD["cpu"], "tokamax.ragged_dot": "run pip install tokamax"}
"""Remedies for missing backends of grouped products."""


@dataclass(frozen=True)
class Implementation:
    """Implementation of a balancer or operation on one backend."""

    op: str  # name of the balancer or operation
    implementation: str  # its implementation, as text
    why: str  # reason for this implementation
    faster: str | None  # remedy for a faster implementation; `None` if this is the fastest


@dataclass(frozen=True)
class OperationForms:
    """Possible implementations of an operation."""

    name: str  # name of the operation
    plain: str  # its implementation in plain JAX
    why: str  # reason for plain JAX
    on_accelerators: str | None = None  # its XLA operation on GPUs and TPUs, if any
    target: str | None = None  # its custom call without the prefix, if any
    backends: tuple[str, ...] = ()  # backends with the custom call


NO_RAGGED = "XLA:CPU cannot run lax.ragged_all_to_all"
GROUPED_FFN = "grouped_ffn"
OPERATIONS = (
    OperationForms("relay", "a loop in jnp", "it runs on every backend", None, "plan_relay", ("cpu", "gpu")),
    OperationForms(
        "ragged_all_to_all", "padded all_to_all", NO_RAGGED, "lax.ragged_all_to_all", "ragged_exchange", ("cpu",)
    ),
    OperationForms(GROUPED_FFN, "", "", None, "grouped_matmul", ("cpu",)),
    OperationForms("gather", "ring of ppermute", NO_RAGGED, "lax.ragged_all_to_all", "ragged_exchange", ("cpu",)),
    OperationForms(
        "copy_expert_weights", "ring of ppermute", NO_RAGGED, "lax.ragged_all_to_all", "copy_start", ("cpu", "gpu")
    ),
    OperationForms(
        "plan_and_copy",
        "a loop in jnp, then a ring of ppermute",
        NO_RAGGED,
        "lax.ragged_all_to_all",
        "plan_greedy_and_copy",
        ("cpu", "gpu"),
    ),
)


def version(package: str) -> str:
    """Return the version of a package, or "not installed"."""
    # A checkout on the path has no metadata, or the metadata of another installation.
    if package == "jax_moe_lb":
        return jax_moe_lb.__version__
    try:
        found: str | None = metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
    return found or "unknown"  # None if the metadata is incomplete


def compiler_states() -> dict[str, str]:
    """Return the state per compiler of accelerators for `compile`."""
    return {
        f"for {extra}": "installed" if has_compiler(extra) else f"missing; {how_to_install(extra)}" for extra in EXTRAS
    }


def implementations(backend: str) -> list[Implementation]:
    """Return the implementation per operation on `backend`, one of JAX's platform names."""
    return [_implementation(operation, backend) for operation in OPERATIONS]


def balancer_implementations(backend: str) -> list[Implementation]:
    """Return the implementation per balancer of `balancer_names()` on `backend`, from the lowered program."""
    return [_of_balancer(name, backend) for name in balancer_names()]


def _of_balancer(name: str, backend: str) -> Implementation:
    balancer, topology, counts = load_balancer(name), Topology.flat(4, 2), jnp.ones((4, 8), jnp.int32)
    if not needs_counts(balancer):
        return Implementation(name, "no planner", "the placement does not depend on the load", None)
    start = jax.tree.map(jnp.asarray, plain_plan(counts, topology, 3))

    def rebalance(counts: Counts, plan: Plan, state: State) -> tuple[Plan, State]:
        return balancer.rebalance(counts, plan, topology, state)

    traced = jax.jit(rebalance).trace(counts, start, balancer.init((4, 8)))
    if "pure_callback" in str(traced.jaxpr):
        return Implementation(name, "a callback on the host", "it plans with NumPy and SciPy", None)
    lowered = traced.lower(lowering_platforms=(LOWERING_PLATFORMS[backend],)).as_text()
    if calls := sorted(set(re.findall(r"moe_lb_plan_\w+", lowered))):
        built = f"built for {LOWERING_PLATFORMS[backend]}"
        if any(call.endswith("_kernel") for call in calls):
            built += "; domains above 128 ranks, or too large for shared memory, plan on the host"
        return Implementation(name, f"custom call {', '.join(calls)}", built, None)
    remedy = HOW_TO_BUILD.get(LOWERING_PLATFORMS[backend])
    why = "it runs on every backend"
    return Implementation(name, "a loop in jnp", why if remedy is None else f"{why}; no custom call was built", remedy)


def _implementation(op: OperationForms, backend: str) -> Implementation:
    platform = LOWERING_PLATFORMS[backend] if backend in op.backends else None
    if platform and _custom_calls.is_built(platform):
        return Implementation(op.name, f"custom call moe_lb_{op.target}", f"built for {platform}", None)
    if op.name == GROUPED_FFN:
        choice = _choose("product", LOWERING_PLATFORMS[backend])
        faster = (how for name, how in HOW_TO_MULTIPLY.items() if choice.rejected.get(name) == NOT_INSTALLED)
        return Implementation(op.name, choice.backend.name, choice.why, next(faster, None))
    # On CPUs these XLA operations are unsupported, or slower than the custom calls.
    if op.on_accelerators and backend != "cpu":
        why = f"XLA has it for {backend}, and it transfers only the needed rows"
        return Implementation(op.name, op.on_accelerators, why, HOW_TO_BUILD[platform] if platform else None)
    if platform:
        return Implementation(op.name, op.plain, f"{op.why}; no custom call was built", HOW_TO_BUILD[platform])
    return Implementation(op.name, op.plain, op.why, None)


def _choose(kind: Kind, platform: str, *, in_parts: bool = False) -> BackendChoice:
    # All kernels support these sizes, so the choice depends on the installation and the device.
    dtypes = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.bfloat16)
    return choose_backend(Product(kind, 1024, (256, 512), (6, 2) if in_parts else 8, dtypes, dtypes[0]), platform)


def grouped_products() -> list[dict[str, str]]:
    """Return the backend of each grouped product of bfloat16 on each platform, and the reasons for it, as JSON."""
    cases = [(platform, False) for platform in PLATFORMS] + [("cuda", True)]
    return [
        {
            "platform": platform,
            "weights": "in parts" if in_parts else "in one array",
            "product": kind,
            "backend": choice.backend.name,
            "why": choice.why,
        }
        for platform, in_parts in cases
        for kind in KINDS
        for choice in [_choose(kind, platform, in_parts=in_parts)]
    ]


def diagnosis() -> dict:
    """Return versions, extension modules, compilers, devices, compiler options and implementations as JSON."""
    backend = jax.default_backend()
    return {
        "versions": {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}},
        "build": build_states(),
        "compilers": compiler_states(),
        "pure_jax": pure_jax_message(),
        "shadowed": shadowed_install_message(),
        "backend": backend,
        "devices": [f"{device} ({device.device_kind})" for device in jax.devices()],
        "compiler_options": compiler_options(Mesh(np.array(jax.devices()), ("devices",))),
        "exchange": exchange_of_all_devices(),
        "balancers": [asdict(implementation) for implementation in balancer_implementations(backend)],
        "ops": [asdict(implementation) for implementation in implementations(backend)],
        "grouped_products": grouped_products(),
    }


def exchange_of_all_devices() -> dict[str, str]:
    """Return the path of an exchange over all devices as one group, and the reason for it."""
    mesh = Mesh(np.array(jax.devices()), ("expert",))
    choice = exchange_path(Topology.from_mesh(mesh))
    return {"path": choice.path.value, "why": choice.reason}


def shadowed_install_message() -> str | None:
    """Return the remedy if the source folder shadows an installation with custom calls, else `None`."""
    hidden = _custom_calls.shadowed_installation()
    if hidden is None:
        return None
    here = Path(__file__).parents[1]
    return f"{here} shadows {hidden} and has no custom calls; run pip install -e ., or run from another folder"


def facts_table(found: dict) -> Table:
    """Return a table of versions, extension modules, compilers and devices."""
    table = Table(show_header=False, box=SIMPLE_HEAD)
    for part in ("versions", "build", "compilers"):
        for name, value in found[part].items():
            table.add_row(name, escape(value))
        table.add_section()
    for message in filter(None, (found["pure_jax"], found["shadowed"])):
        table.add_row("installation", escape(message))
    table.add_row("backend", found["backend"])
    table.add_row("devices", "\n".join(found["devices"]))
    table.add_row("exchange of rows", escape(f"{found['exchange']['path']}: {found['exchange']['why']}"))
    options = "\n".join(f"{name}={value}" for name, value in found["compiler_options"].items())
    table.add_row("options for XLA", options or "none needed")
    return table


def implementations_table(kind: str, rows: list[dict]) -> Table:
    """Return a table with one row per balancer or operation."""
    table = Table(box=SIMPLE_HEAD, show_lines=True)
    for header in (kind, "implementation", "why", "faster"):
        table.add_column(header, overflow="fold", no_wrap=header == kind)
    for row in rows:
        table.add_row(*map(escape, (row["op"], row["implementation"], row["why"], row["faster"] or "-")))
    return table


def products_table(found: dict) -> Table:
    """Return a table with one row per platform, form of the weights and backend of grouped products."""
    table = Table(title="grouped products of bfloat16", title_justify="left", box=SIMPLE_HEAD, show_lines=True)
    for header in ("platform", "weights", "product", "backend", "why"):
        table.add_column(header, overflow="fold")
    kinds: dict[tuple[str, ...], list[str]] = {}
    for row in found["grouped_products"]:
        key = (row["platform"], row["weights"], row["backend"], row["why"])
        kinds.setdefault(key, []).append(row["product"])
    for (platform_name, weights, backend, why), products in kinds.items():
        table.add_row(*map(escape, (platform_name, weights, ", ".join(products), backend, why)))
    return table
