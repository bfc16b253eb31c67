"""What is installed here, and which implementation of each operation the layers will run."""

import platform
from dataclasses import asdict, dataclass
from importlib import metadata

import jax
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from jax_moe_lb.ops.grouped_ffn import has_tokamax

PACKAGES = ("jax_moe_lb", "jax", "jaxlib", "flax", "numpy")
ACCELERATOR = "run on a GPU or TPU: pip install 'jax[cuda13]' or 'jax[tpu]'"


@dataclass(frozen=True)
class Implementation:
    """What an operation runs on one backend.

    Args:
        op: the operation.
        implementation: what it is made of.
        why: the reason for this one.
        faster: how to get a faster one; `None` where there is none.
    """

    op: str
    implementation: str
    why: str
    faster: str | None


def version(package: str) -> str:
    """The installed version of a package, or that it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def implementations(backend: str) -> list[Implementation]:
    """What each operation runs on `backend`, one of JAX's platform names."""
    if backend == "cpu":
        return [
            Implementation(
                "ragged_all_to_all", "padded all_to_all", "XLA:CPU cannot run lax.ragged_all_to_all", ACCELERATOR
            ),
            Implementation(
                "grouped_ffn", "blocked", "lax.ragged_dot on a CPU multiplies every row with every expert", ACCELERATOR
            ),
            Implementation("gather", "ring of ppermute", "XLA:CPU cannot run lax.ragged_all_to_all", ACCELERATOR),
        ]
    native = f"XLA has it for {backend}, and only what is needed travels"
    return [
        Implementation("ragged_all_to_all", "lax.ragged_all_to_all", native, None),
        _ragged_ffn(),
        Implementation("gather", "lax.ragged_all_to_all", native, None),
    ]


def _ragged_ffn() -> Implementation:
    if has_tokamax():
        return Implementation("grouped_ffn", "tokamax.ragged_dot", "tokamax is installed", None)
    return Implementation("grouped_ffn", "lax.ragged_dot", "tokamax is not installed", "pip install tokamax")


def diagnosis() -> dict:
    """Versions, devices and implementations, as JSON holds them."""
    backend = jax.default_backend()
    return {
        "versions": {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}},
        "backend": backend,
        "devices": [f"{device} ({device.device_kind})" for device in jax.devices()],
        "ops": [asdict(implementation) for implementation in implementations(backend)],
    }


def facts_table(found: dict) -> Table:
    """Versions and devices."""
    table = Table(show_header=False, box=SIMPLE_HEAD)
    for package, number in found["versions"].items():
        table.add_row(package, number)
    table.add_section()
    table.add_row("backend", found["backend"])
    table.add_row("devices", "\n".join(found["devices"]))
    return table


def ops_table(found: dict) -> Table:
    """One row per operation."""
    table = Table(box=SIMPLE_HEAD, show_lines=True)
    for header in ("op", "implementation", "why", "how to get a faster one"):
        table.add_column(header, overflow="fold")
    for op in found["ops"]:
        table.add_row(*map(escape, (op["op"], op["implementation"], op["why"], op["faster"] or "this is the fastest")))
    return table
