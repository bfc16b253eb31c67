"""`diagnosis` says what is installed here, and which implementation of each operation the layers will run."""

import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from jax_moe_lb import _custom_calls
from jax_moe_lb.cli.build import HOW_TO_BUILD, build_states
from jax_moe_lb.compiled.targets import EXTRAS, has_compiler
from jax_moe_lb.compiler_options import compiler_options
from jax_moe_lb.ops.grouped_kernels import has_tokamax

PACKAGES = ("jax_moe_lb", "jax", "jaxlib", "flax", "numpy")
CUSTOM_CALL_PLATFORMS = {"cpu": "cpu", "gpu": "cuda"}
"""Custom calls exist on these platforms, by JAX's name of the backend."""


@dataclass(frozen=True)
class Implementation:
    """This is what an operation runs on one backend.

    Args:
        op: the operation's name.
        implementation: what it is made of, in words.
        why: the reason for this one.
        faster: how to get a faster one; `None` where there is none.
    """

    op: str
    implementation: str
    why: str
    faster: str | None


@dataclass(frozen=True)
class Operation:
    """This is what an operation can be made of.

    Args:
        name: the operation's name.
        plain: its form in plain JAX, on backends that have nothing better.
        why: the reason for that form.
        on_accelerators: what XLA has for it on GPUs and TPUs.
        target: its custom call, without the prefix.
        backends: the backends where it uses the custom call, if that was built.
    """

    name: str
    plain: str
    why: str
    on_accelerators: str | None = None
    target: str | None = None
    backends: tuple[str, ...] = ()


def _planner(name: str) -> Operation:
    return Operation(name, "a loop in jnp", "it runs on every backend", None, f"plan_{name}", ("cpu", "gpu"))


NO_RAGGED = "XLA:CPU cannot run lax.ragged_all_to_all"
DENSE = "lax.ragged_dot multiplies every row with every expert on CPUs and GPUs"
GROUPED_PRODUCTS = "grouped products"
OPERATIONS = (
    _planner("greedy"),
    _planner("eplb_plus"),
    _planner("feplb"),
    _planner("fastermoe"),
    _planner("ultraep"),
    _planner("relay"),
    _planner("spray"),
    _planner("exact"),
    Operation(
        "ragged_all_to_all", "padded all_to_all", NO_RAGGED, "lax.ragged_all_to_all", "ragged_exchange", ("cpu",)
    ),
    Operation("grouped_ffn", "blocks of rows", DENSE, GROUPED_PRODUCTS, "grouped_matmul", ("cpu",)),
    Operation("gather", "ring of ppermute", NO_RAGGED, "lax.ragged_all_to_all", "ragged_exchange", ("cpu",)),
    Operation(
        "copy_expert_weights", "ring of ppermute", NO_RAGGED, "lax.ragged_all_to_all", "copy_start", ("cpu", "gpu")
    ),
    Operation(
        "plan_and_copy",
        "a loop in jnp, then a ring of ppermute",
        NO_RAGGED,
        "lax.ragged_all_to_all",
        "plan_greedy_and_copy",
        ("cpu", "gpu"),
    ),
)


def version(package: str) -> str:
    """Tells the installed version of a package, or that it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def compiler_states() -> dict[str, str]:
    """Says of each compiler for accelerators whether `compile` can use it."""
    return {
        f"for {extra}": "installed" if has_compiler(extra) else f"missing; to get it: pip install 'jax_moe_lb[{extra}]'"
        for extra in EXTRAS
    }


def implementations(backend: str) -> list[Implementation]:
    """Tells what each operation runs on `backend`, one of JAX's platform names."""
    return [_implementation(operation, backend) for operation in OPERATIONS]


def _implementation(op: Operation, backend: str) -> Implementation:
    platform = CUSTOM_CALL_PLATFORMS[backend] if backend in op.backends else None
    if platform and _custom_calls.is_built(platform):
        return Implementation(op.name, f"custom call moe_lb_{op.target}", f"built for {platform}", None)
    # XLA has CPU forms of these names, which are slower than this package's or do not run.
    if op.on_accelerators and backend != "cpu":
        return _on_accelerators(op, backend, HOW_TO_BUILD[platform] if platform else None)
    if platform:
        return Implementation(op.name, op.plain, f"{op.why}; no custom call was built", HOW_TO_BUILD[platform])
    return Implementation(op.name, op.plain, op.why, None)


def _on_accelerators(op: Operation, backend: str, faster: str | None) -> Implementation:
    if op.on_accelerators == GROUPED_PRODUCTS:
        return _grouped_products(op, backend)
    why = f"XLA has it for {backend}, and only what is needed travels"
    return Implementation(op.name, str(op.on_accelerators), why, faster)


def _grouped_products(op: Operation, backend: str) -> Implementation:
    if backend == "tpu":
        return Implementation(op.name, "lax.ragged_dot", "XLA has a kernel for tpu", None)
    if backend == "gpu" and has_tokamax():
        return Implementation(
            op.name, "tokamax.ragged_dot", "tokamax is installed; other dtypes than bfloat16 take blocks", None
        )
    return Implementation(op.name, op.plain, f"{op.why}; tokamax is not installed", "pip install tokamax")


def diagnosis() -> dict:
    """Collects versions, extension modules, compilers, devices, what `compiler_options` returns for all of them, and
    implementations, as JSON holds them.
    """
    backend = jax.default_backend()
    return {
        "versions": {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}},
        "build": build_states(),
        "compilers": compiler_states(),
        "shadowed": shadow_line(),
        "backend": backend,
        "devices": [f"{device} ({device.device_kind})" for device in jax.devices()],
        "compiler_options": compiler_options(Mesh(np.array(jax.devices()), ("devices",))),
        "ops": [asdict(implementation) for implementation in implementations(backend)],
    }


def shadow_line() -> str | None:
    """Says in a line what to do where the source folder hides an installation; `None`, which is usual, elsewhere."""
    hidden = _custom_calls.shadowed_installation()
    if hidden is None:
        return None
    here = Path(__file__).parents[1]
    return f"{hidden} is passed by for {here}, which has no custom calls: pip install -e ., or run from another folder"


def facts_table(found: dict) -> Table:
    """Makes a table of versions, extension modules, compilers and devices."""
    table = Table(show_header=False, box=SIMPLE_HEAD)
    for part in ("versions", "build", "compilers"):
        for name, value in found[part].items():
            table.add_row(name, escape(value))
        table.add_section()
    if found["shadowed"]:
        table.add_row("installation", escape(found["shadowed"]))
    table.add_row("backend", found["backend"])
    table.add_row("devices", "\n".join(found["devices"]))
    options = "\n".join(f"{name}={value}" for name, value in found["compiler_options"].items())
    table.add_row("options for XLA", options or "none needed")
    return table


def ops_table(found: dict) -> Table:
    """Makes a table with one row per operation."""
    table = Table(box=SIMPLE_HEAD, show_lines=True)
    for header in ("op", "implementation", "why", "how to get a faster one"):
        table.add_column(header, overflow="fold", no_wrap=header == "op")
    for op in found["ops"]:
        table.add_row(*map(escape, (op["op"], op["implementation"], op["why"], op["faster"] or "this is the fastest")))
    return table
