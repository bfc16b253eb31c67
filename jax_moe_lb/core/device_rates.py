"""Rates of accelerators from TOML files: links, kernels, launches and products.

`devices/KIND.toml` has the rates of one kind of device. Each value has a `basis`, one of `data sheet`, `measured` and
`assumed`, and its `source`. A file may name another one as its `base` and override values of it. Peak rates, memory and
memory bandwidth are in `aot/targets.py`.
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal, get_args, get_type_hints

from jax_moe_lb.core.checks import shown
from jax_moe_lb.core.quantities import rate, speed, time

BASES = ("data sheet", "measured", "assumed")
"""Origins of a value."""

PLATFORMS = {"nvidia": "cuda", "tpu": "tpu"}
"""Platforms of the files that are the base of all others."""

FOLDER = "devices"

PRODUCTS = ("product", "transposed", "outer")
"""Kinds of grouped products; `outer` are the gradients of weights."""

RecordedKernel = Literal["Mosaic", "Triton", "Hopper"]
"""Kernel of grouped products: of tokamax, compiled by Mosaic; of this library for Triton; or for Hopper alone."""


def _figure(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a parser of a mapping with `value`, `basis` and `source` that keeps the parsed value."""

    def read(figure: object) -> Any:
        if not isinstance(figure, Mapping) or set(figure) != {"value", "basis", "source"}:
            raise ValueError(f"is {shown(figure)}; expected value, basis and source")
        if figure["basis"] not in BASES:
            raise ValueError(f"basis is {shown(figure['basis'])}; expected one of {', '.join(BASES)}")
        if not isinstance(figure["source"], str) or not figure["source"].strip():
            raise ValueError(f"source is {shown(figure['source'])}; expected text")
        return parse(figure["value"])

    return read


def _share(value: object) -> float:
    if not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"is {shown(value)}; expected a share above 0 and at most 1")
    return float(value)


def _by_number(parse: Callable[[Any], float], wanted: str) -> Callable[[object], dict[int, float]]:
    """Return a parser of a mapping from ascending integers."""

    def read(value: object) -> dict[int, float]:
        if not isinstance(value, Mapping) or not value or list(value) != sorted(value, key=int):
            raise ValueError(f"is {shown(value)}; expected {wanted}, ascending")
        return {int(number): parse(one) for number, one in value.items()}

    return read


def _speeds(value: object) -> dict[str, float]:
    if not isinstance(value, Mapping) or set(value) != set(PRODUCTS):
        raise ValueError(f"is {shown(value)}; expected product, transposed and outer")
    return {kind: speed(one) for kind, one in value.items()}


def _kernels(value: Any) -> dict[str, dict[str, float]]:
    known = isinstance(value, Mapping) and all(
        isinstance(kinds, Mapping) and set(kinds) <= set(PRODUCTS) for kinds in value.values()
    )
    if not known or not set(value) <= set(get_args(RecordedKernel)):
        raise ValueError(f"is {shown(value)}; expected speeds by kernel and kind of product")
    return {kernel: {kind: speed(one) for kind, one in kinds.items()} for kernel, kinds in value.items()}


Rate = Annotated[float, _figure(rate)]
Time = Annotated[float, _figure(time)]
Speed = Annotated[float, _figure(speed)]
Share = Annotated[float, _figure(_share)]
Shares = Annotated[dict[int, float], _figure(_by_number(_share, "shares by updates per peer"))]
Times = Annotated[dict[int, float], _figure(_by_number(time, "times by ranks of a domain"))]
Speeds = Annotated[dict[str, float], _figure(_speeds)]
ByRows = Annotated[dict[int, float], _figure(_by_number(speed, "speeds by rows"))]
Kernels = Annotated[dict[str, dict[str, float]], _figure(_kernels)]
Count = Annotated[int, _figure(int)]
Text = Annotated[str, str]


@dataclass(frozen=True)
class DeviceRates:
    """Rates of one kind of device, in bytes, floating-point operations and seconds."""

    link: Rate  # rate of a link in one direction: all NVLinks of a GPU, or one ICI link of a TPU
    link_share: Share  # share of `link` reached by XLA's exchanges
    collective: Time  # time of a collective of few bytes
    host_wait: Time  # time of a wait of the host for the device, or of a TPU for its host
    launch: Time  # least time between two launches by the host, outside of command buffers
    start: Time  # time between the end of an operation and the start of the next
    planner: Time  # time of a planner on the host, with its copies
    dense: Speed  # rate of large products in bfloat16
    float32: Speed  # rate of products in float32 of highest precision
    # Rates of grouped products by kind: `product`, `transposed` and `outer`, the gradients of weights. They apply to
    # kernels that `kernels` does not list.
    grouped: Speeds
    memory_share: Share  # share of the memory bandwidth reached by operations that it bounds


@dataclass(frozen=True)
class GpuRates(DeviceRates):
    """Rates of one GPU."""

    network: Rate  # rate of a GPU's network interface in one direction
    network_share: Share  # share of `network` reached by NCCL
    network_latency: Time  # time of one message between nodes
    copy_engines: Rate  # rate of peer copies by copy engines in one direction
    block_kib: Time  # time of 1 KiB in a thread block of XLA's one-shot kernel
    block_update: Time  # time of one update in a thread block of that kernel
    one_shot: Time  # time of that kernel without bytes
    nccl_update: Time  # time of the send and the receive of one update by NCCL
    device_kernel: Shares  # share of `link` reached by NCCL's device kernel, by updates per peer
    planner_kernel: Times  # time of a planner that runs as a kernel, by ranks of a domain
    # Time of sorts, addresses and other small operations of one round of a layer, forward and backward
    small_operations: Time
    capability: Text = ""  # compute capability of the devices whose kernels `kernels` lists, such as "9.0"
    kernels: Kernels = field(default_factory=dict)  # rates of kernels of grouped products, by compiler and kind
    # Rate of experts by the rows of one, over forward and backward pass and with the operations between products; the
    # backward pass counts as three forward passes. Empty if unknown.
    experts: ByRows = field(default_factory=dict)

    @property
    def experts_speed(self) -> float:
        """Rate of experts of many rows, in floating-point operations per second."""
        return max(self.experts.values(), default=self.grouped["product"])


@dataclass(frozen=True)
class TpuRates(DeviceRates):
    """Rates of one TPU chip."""

    links: Count  # number of links of a chip
    matrix_unit: Count  # rows and columns of a matrix unit, and rows of a tile of products
    hop: Time  # latency of one hop between neighbors
    cycle: Time  # time of an instruction bundle
    gathered_row: Count  # instruction bundles of a row in the gather kernel for rows
    summed_row: Count  # instruction bundles of a row in the kernel for sums of rows
    planned_vector: Count  # instruction bundles of a vector in a step of the planner


MODELS: dict[Literal["cuda", "tpu"], type[GpuRates] | type[TpuRates]] = {"cuda": GpuRates, "tpu": TpuRates}


def device_rates(kind: str, platform: Literal["cuda", "tpu"]) -> GpuRates | TpuRates:
    """Read the rates of a kind of device."""
    known = rated_devices()
    if kind not in known:
        raise ValueError(f"device is {shown(kind)}; expected one with rates: {', '.join(known)}")
    try:
        return _parsed(MODELS[platform], _merged(kind))
    except ValueError as error:
        raise ValueError(f"{FOLDER}/{kind}.toml: {error}") from error


def _parsed(model: type[GpuRates] | type[TpuRates], content: Mapping[str, Any]) -> GpuRates | TpuRates:
    needed = {one.name: one.default is MISSING and one.default_factory is MISSING for one in fields(model)}
    if unknown := [name for name in content if name not in needed]:
        raise ValueError(f"{unknown[0]} is unknown; expected one of {', '.join(needed)}")
    if missing := [name for name, is_needed in needed.items() if is_needed and name not in content]:
        raise ValueError(f"{missing[0]} is missing; expected all of {', '.join(needed)}")
    hints, values = get_type_hints(model, include_extras=True), {}
    for name, value in content.items():
        try:
            values[name] = hints[name].__metadata__[0](value)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from error
    return model(**values)


def device_named(name: str) -> str | None:
    """Return the kind of a GPU with rates; None if there is none."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return next((word for word in words if word in rated_devices()), None) if "nvidia" in words else None


@cache
def recorded_tflops(
    capability: str, kind: str, kernel: RecordedKernel | None, device: str | None = None
) -> float | None:
    """Return the recorded rate of a kernel of grouped products in TFLOP/s; None if there is none."""
    # `choose_backend` prefers a kernel to an earlier one by it. A device without a file has the rates of the first
    # one of its capability.
    names = [device] if device in rated_devices() else rated_devices()
    gpus = (rates for name in names if (rates := _merged(name)).get("capability") == capability)
    found: dict[str, Any] = next((one.get("kernels", {"value": {}})["value"] for one in gpus), {})
    recorded = found.get(kernel or "", {}).get(kind)
    return None if recorded is None else speed(recorded) / 1e12


def rated_devices(platform: Literal["cuda", "tpu"] | None = None) -> list[str]:
    """List the kinds of devices with rates, of one platform or of all (default)."""
    rated = (name for name, content in _files().items() if "base" in content)
    return sorted(name for name in rated if platform in (None, PLATFORMS[_root(name)]))


def _root(name: str) -> str:
    base = _files()[name].get("base")
    return name if base is None else _root(base)


def _merged(name: str) -> dict[str, Any]:
    content = dict(_files()[name])
    base = content.pop("base", None)
    before = _merged(base) if base else {}
    if "kernels" in before and "kernels" in content:
        # A run on a device may reach some kernels, and some kinds of their products.
        old, new = before["kernels"]["value"], content["kernels"]["value"]
        content["kernels"] = content["kernels"] | {
            "value": {one: old.get(one, {}) | new.get(one, {}) for one in old | new}
        }
    return before | content


@cache
def _files() -> dict[str, dict[str, Any]]:
    found = {}
    for file in (resources.files(__package__) / FOLDER).iterdir():
        if file.name.endswith(".toml"):
            found[file.name.removesuffix(".toml")] = tomllib.loads(file.read_text())
    return found
