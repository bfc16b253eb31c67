"""The command `doctor`: installed modules, and the implementation of each operation."""

import importlib
import importlib.util
import platform
import re
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

from jax_moe_lb.aot.compiler_options import compiler_options
from jax_moe_lb.aot.targets import EXTRAS, has_compiler
from jax_moe_lb.core import custom_calls as _custom_calls
from jax_moe_lb.kernels.backends import KINDS, NOT_INSTALLED, PLATFORMS, BackendChoice, Kind, Product, choose_backend

IN_A_CHECKOUT = "in a checkout, `pip install .` where there is a C++17 compiler"
HOW_TO_BUILD = {"cpu": IN_A_CHECKOUT, "cuda": f"{IN_A_CHECKOUT} and the CUDA toolkit"}
"""It says how to get the custom calls of each platform."""


def build_states() -> dict[str, str]:
    """Says of each extension module in words whether it is there."""
    modules = {_custom_calls.MODULES[platform]: how for platform, how in HOW_TO_BUILD.items()} | {
        _custom_calls.PLANNING_MODULE: IN_A_CHECKOUT
    }
    return {module: _state(module, how) for module, how in modules.items()}


def _state(module: str, how_to_build: str) -> str:
    # A module that is missing is another fault than one that is there and cannot be loaded.
    if importlib.util.find_spec(module) is None:
        return f"missing; to get it: {how_to_build}"
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        return f"cannot be loaded: {error}"
    if module == _custom_calls.PLANNING_MODULE:
        return "built"
    state, reason = _registrations_state(loaded.registrations()), _custom_calls.why_unusable(module)
    if reason is not None:
        return f"{state}; not used: {reason}"
    return "; ".join([state, *_lacks(loaded)])


def _lacks(module: ModuleType) -> list[str]:
    # What a driver may lack, and the module then does without.
    asked = (getattr(module, name, None) for name in ("why_not_batched", "why_not_between_processes"))
    return [reason for ask in asked if ask is not None and (reason := ask()) is not None]


def _registrations_state(registrations: dict) -> str:
    built, accepted = registrations["api_version"], newest_api_version()
    state = f"built, {len(registrations['handlers'])} custom calls, XLA FFI {_dotted(built)}"
    # XLA takes handlers of its own version or older ones.
    if built > accepted:
        return f"{state}; this jaxlib takes at most {_dotted(accepted)}: build it again"
    return state


def newest_api_version() -> tuple[int, int]:
    """Reads the version of XLA's foreign function interface that the installed jaxlib has; it takes older ones too.

    Raises:
        ValueError: the headers of jaxlib do not say it.
    """
    header = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    major, minor = (re.search(rf"#define XLA_FFI_API_{part} (\d+)", header) for part in ("MAJOR", "MINOR"))
    if major is None or minor is None:
        raise ValueError("the headers of jaxlib do not say their version; expected XLA_FFI_API_MAJOR and _MINOR")
    return int(major[1]), int(minor[1])


def _dotted(number: tuple[int, int]) -> str:
    return ".".join(map(str, number))


PACKAGES = ("jax_moe_lb", "jax", "jaxlib", "flax", "numpy")
CUSTOM_CALL_PLATFORMS = {"cpu": "cpu", "gpu": "cuda"}
"""Custom calls exist on these platforms, by JAX's name of the backend."""
LOWERING_PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
"""Platforms that programs are lowered for, by JAX's name of the backend."""
HOW_TO_MULTIPLY = {"custom call": HOW_TO_BUILD["cpu"], "tokamax.ragged_dot": "pip install tokamax"}
"""Ways to get the backends of grouped products that may be missing."""


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
class OperationForms:
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


def _planner(name: str) -> OperationForms:
    return OperationForms(name, "a loop in jnp", "it runs on every backend", None, f"plan_{name}", ("cpu", "gpu"))


NO_RAGGED = "XLA:CPU cannot run lax.ragged_all_to_all"
GROUPED_FFN = "grouped_ffn"
OPERATIONS = (
    _planner("greedy"),
    _planner("eplb_plus"),
    _planner("feplb"),
    _planner("fastermoe"),
    _planner("ultraep"),
    _planner("relay"),
    _planner("spray"),
    _planner("exact"),
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


def _implementation(op: OperationForms, backend: str) -> Implementation:
    platform = CUSTOM_CALL_PLATFORMS[backend] if backend in op.backends else None
    if platform and _custom_calls.is_built(platform):
        return Implementation(op.name, f"custom call moe_lb_{op.target}", f"built for {platform}", None)
    if op.name == GROUPED_FFN:
        choice = _choose("product", LOWERING_PLATFORMS[backend])
        faster = (how for name, how in HOW_TO_MULTIPLY.items() if choice.rejected.get(name) == NOT_INSTALLED)
        return Implementation(op.name, choice.backend.name, choice.why, next(faster, None))
    # XLA has CPU forms of these names, which are slower than this package's or do not run.
    if op.on_accelerators and backend != "cpu":
        why = f"XLA has it for {backend}, and only what is needed travels"
        return Implementation(op.name, op.on_accelerators, why, HOW_TO_BUILD[platform] if platform else None)
    if platform:
        return Implementation(op.name, op.plain, f"{op.why}; no custom call was built", HOW_TO_BUILD[platform])
    return Implementation(op.name, op.plain, op.why, None)


def _choose(kind: Kind, platform: str, *, in_parts: bool = False) -> BackendChoice:
    # All kernels take these sizes, so only the installation and the device decide.
    dtypes = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.bfloat16)
    return choose_backend(Product(kind, 1024, (256, 512), (6, 2) if in_parts else 8, dtypes, dtypes[0]), platform)


def grouped_products() -> list[dict[str, str]]:
    """Return the backend of each grouped product of bfloat16 on each platform, and the reasons for it, as JSON."""
    cases = [(platform, False) for platform in PLATFORMS] + [("cuda", True)]
    return [
        {
            "platform": platform,
            "weights": "in parts (own kernels)" if in_parts else "in one array",
            "product": kind,
            "backend": choice.backend.name,
            "why": choice.why,
        }
        for platform, in_parts in cases
        for kind in KINDS
        for choice in [_choose(kind, platform, in_parts=in_parts)]
    ]


def diagnosis() -> dict:
    """Collects versions, extension modules, compilers, devices, what `compiler_options` returns for all of them, and
    implementations, as JSON holds them.
    """
    backend = jax.default_backend()
    return {
        "versions": {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}},
        "build": build_states(),
        "compilers": compiler_states(),
        "shadowed": shadowed_install_message(),
        "backend": backend,
        "devices": [f"{device} ({device.device_kind})" for device in jax.devices()],
        "compiler_options": compiler_options(Mesh(np.array(jax.devices()), ("devices",))),
        "ops": [asdict(implementation) for implementation in implementations(backend)],
        "grouped_products": grouped_products(),
    }


def shadowed_install_message() -> str | None:
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


def products_table(found: dict) -> Table:
    """Make a table with one row per platform, form of the weights and backend of grouped products."""
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
