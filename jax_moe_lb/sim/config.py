"""YAML files of the simulator, and quantities with units.

A file has `version: 1` and any of the keys `cluster`, `model`, `system`, `migration`, `routing` and `step`. The values
of `cluster` and `model` may be names of presets. `docs/simulator.md` describes the format. Quantities carry a unit; see
`core/quantities.py`.
"""

import difflib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from jax_moe_lb.core.checks import shown
from jax_moe_lb.core.device_rates import GpuRates, device_rates, rated_devices
from jax_moe_lb.core.file_limits import FileLimits
from jax_moe_lb.core.quantities import rate, size, speed, time
from jax_moe_lb.core.topology import INT32_MAX, LEVEL_NAMES
from jax_moe_lb.recordings.yaml_file import read_yaml
from jax_moe_lb.sim.cluster import AnalyticGemm, Cluster, Communication, Gemm, Links, MeasuredGemm
from jax_moe_lb.sim.drift import RECORDED, Drift
from jax_moe_lb.sim.limits import MOST_LAYERS, MOST_POINTS, MOST_WIDTH
from jax_moe_lb.sim.loads import LoadShape
from jax_moe_lb.sim.migration import Migration
from jax_moe_lb.sim.model import ModelShape, Parallel, Peers, Step
from jax_moe_lb.transport.compression import Codec, CodecBase

VERSION = 1
"""Version of the format. Files of another version are rejected."""

GEMM_LAUNCH_S = 10e-6
"""Assumed launch overhead of a grouped FFN on a GPU."""

MOST_NAME = 60
"""Maximum length of a key in messages, and of a name compared with preset names."""

CountField = Annotated[int, Field(strict=True, ge=1, le=INT32_MAX)]
"""Count of 1 to the maximum of int32, because planners count in int32."""

SizeField = Annotated[float, BeforeValidator(size)]
RateField = Annotated[float, BeforeValidator(rate)]
TimeField = Annotated[float, BeforeValidator(time)]
SpeedField = Annotated[float, BeforeValidator(speed)]
LayersField = Annotated[int, Field(strict=True, ge=1, le=MOST_LAYERS)]
WidthField = Annotated[int, Field(strict=True, ge=1, le=MOST_WIDTH)]
# Numbers are strict: otherwise `true` is 1 and a quoted number is accepted.
NumberField = Annotated[float, Field(strict=True)]
RowsField = Annotated[float, Field(strict=True, ge=0, le=INT32_MAX)]
SeedField = Annotated[int, Field(strict=True, ge=0, lt=2**64)]


def _strict_numbers(default: Any) -> BeforeValidator:
    """Refuse booleans and quoted numbers, which pydantic converts, as numbers of a dataclass with these defaults."""

    def checked(section: Any) -> Any:
        for name, value in section.items() if isinstance(section, dict) else ():
            is_number = not isinstance(getattr(default, name, ""), bool | str)
            if is_number and isinstance(value, bool | str):
                raise ValueError(f"{name} is {shown(value)}; expected a number")
        return section

    return BeforeValidator(checked)


class _Section(BaseModel):
    """Base class of the sections; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LevelSection(_Section):
    """One level of links; see `Links`."""

    # Without `rate`, it has that of the cluster's `device`.

    name: Literal["dc", "node", "gpu"]
    size: CountField
    rate: RateField | None = None
    links: CountField = 1
    latency: TimeField = 0.0

    def build(self, rates: GpuRates | None) -> Links:
        """Build the `Links`."""
        rate = self.rate
        if rate is None and rates is not None and self.name != "dc":
            inside = self.name == "gpu"
            rate = rates.link * rates.link_share if inside else rates.network * rates.network_share
        if rate is None:
            raise ValueError(f"level {self.name} has no rate; expected one, or a device")
        return Links(self.name, self.size, rate, self.links, self.latency)


class GemmSection(_Section):
    """A measured curve (`rows` and `speeds`) or the analytic model (`peak` and `half_rows`)."""

    rows: tuple[RowsField, ...] | None = Field(default=None, max_length=MOST_POINTS)
    speeds: tuple[SpeedField, ...] | None = Field(default=None, max_length=MOST_POINTS)
    peak: SpeedField | None = None
    half_rows: RowsField | None = None
    launch: TimeField = 0.0

    def build(self) -> Gemm:
        """Build the `MeasuredGemm` or the `AnalyticGemm`."""
        if self.rows is not None and self.speeds is not None and self.peak is None and self.half_rows is None:
            return MeasuredGemm(self.rows, self.speeds, self.launch)
        if self.peak is not None and self.rows is None and self.speeds is None:
            return AnalyticGemm(self.peak, self.half_rows or 0.0, self.launch)
        raise ValueError("gemm has neither one alone; expected rows and speeds, or peak and half_rows")


class ClusterSection(_Section):
    """A machine; see `Cluster`."""

    # `device` names a kind of GPU of `core/devices`. Its rates replace a missing `rate` of a level, `gemm` and
    # `copy_engines`, and give the wait for the host, the time of small operations and the share of `hbm` that is
    # reached. Without `planner`, each planner takes the time of `sim/planner_times.yaml`.

    device: str | None = None
    levels: tuple[LevelSection, ...] = Field(max_length=len(LEVEL_NAMES))
    gemm: GemmSection | None = None
    compute: SpeedField
    copy_engines: RateField | None = None
    planner: TimeField | None = None
    domain_level: Literal["dc", "node", "gpu"] | None = None
    memory: SizeField | None = None
    hbm: RateField | None = None
    joins_weights: bool = False
    communication: Annotated[Communication, _strict_numbers(Communication())] = Communication()
    backward: NumberField = Field(default=3.0, ge=1.0, le=1000.0)
    jitter: NumberField = 0.0
    jitter_seed: SeedField = 0

    def build(self) -> Cluster:
        """Build the `Cluster`."""
        rates = None if self.device is None else _gpu_rates(self.device)
        engines, times, share = None, dict[str, float](), 1.0
        if rates is not None:
            engines, share = rates.copy_engines, rates.memory_share
            times = {"host_wait_s": rates.host_wait, "round_s": rates.small_operations}
        return Cluster(
            levels=tuple(level.build(rates) for level in self.levels),
            gemm=self._gemm(rates),
            flops_per_s=self.compute,
            copy_bytes_per_s=engines if self.copy_engines is None else self.copy_engines,
            planner_s=self.planner,
            **times,
            domain_level=self.domain_level,
            memory_bytes=self.memory,
            hbm_bytes_per_s=None if self.hbm is None else share * self.hbm,
            joins_weights=self.joins_weights,
            communication=self.communication,
            backward_factor=self.backward,
            jitter=self.jitter,
            jitter_seed=self.jitter_seed,
        )

    def _gemm(self, rates: GpuRates | None) -> Gemm:
        if self.gemm is not None:
            return self.gemm.build()
        if rates is None or not rates.experts:
            raise ValueError("gemm is missing; expected one, or a device with measured experts: h100, h200")
        return MeasuredGemm(tuple(map(float, rates.experts)), tuple(rates.experts.values()), GEMM_LAUNCH_S)


def _gpu_rates(kind: str) -> GpuRates:
    gpus = rated_devices("cuda")
    if kind not in gpus:
        raise ValueError(f"device is {shown(kind)}; expected a GPU with rates: {', '.join(gpus)}")
    rates = device_rates(kind, "cuda")
    assert isinstance(rates, GpuRates)
    return rates


class ModelSection(_Section):
    """A model; see `ModelShape`."""

    layers: LayersField
    hidden: WidthField
    inner: WidthField
    experts: CountField
    per_token: CountField
    tokens: CountField
    itemsize: CountField = 2
    gradient_itemsize: CountField = 4
    gated: bool = True
    pre_expert: TimeField | None = None
    sequence: CountField = 4096
    other: TimeField = 0.0
    shared_inner: int = Field(default=0, strict=True, ge=0, le=MOST_WIDTH)

    def build(self) -> ModelShape:
        """Build the `ModelShape`."""
        fields = self.model_dump()
        return ModelShape(**fields | {"pre_expert_s": fields.pop("pre_expert"), "other_s": fields.pop("other")})


class MigrationSection(_Section):
    """Gathers of expert domains; see `Migration`."""

    domain_sizes: tuple[CountField, ...] = Field(default=(), max_length=len(LEVEL_NAMES))
    ratio: NumberField = 1.0
    base: CodecBase = CodecBase.REMEMBERED
    gradient_ratio: NumberField | None = None
    gather_again: bool = False

    def build(self) -> Migration:
        """Build the `Migration`."""
        codec = Codec(self.ratio, self.base, self.gradient_ratio)
        return Migration(self.domain_sizes, codec, self.gather_again)


class PeersSection(_Section):
    """Ranks of a group beside the expert-parallel group; see `Peers`."""

    size: CountField
    rate: RateField | None = None
    latency: TimeField = 0.0

    @model_validator(mode="after")
    def _has_rate(self) -> "PeersSection":
        if self.size > 1 and self.rate is None:
            raise ValueError(f"has no rate; expected one between its {self.size} ranks, such as 50 GB/s")
        return self

    def build(self) -> Peers:
        """Build the `Peers`."""
        return Peers(self.size, self.rate, self.latency)


ALONE = PeersSection(size=1)


class ParallelSection(_Section):
    """Groups beside the expert-parallel group; see `Parallel`."""

    tensor: PeersSection = ALONE
    data: PeersSection = ALONE
    pipeline: PeersSection = ALONE
    microbatches: CountField = 1
    interleave: CountField = 1

    def build(self) -> Parallel:
        """Build the `Parallel`."""
        groups = (self.tensor.build(), self.data.build(), self.pipeline.build())
        return Parallel(*groups, self.microbatches, self.interleave)


class StepSection(_Section):
    """Passes of a step; see `Step`."""

    backward: bool = True
    recompute: bool = True
    exchange_counts: bool = True
    optimizer_bytes: NumberField | None = Field(default=None, ge=0.0, le=1000.0)
    parallel: ParallelSection = ParallelSection()

    def build(self) -> Step:
        """Build the `Step`."""
        return Step(**dict(self) | {"parallel": self.parallel.build()})


class RoutingSection(_Section):
    """Parameters of the synthetic counts used without a trace; see `drifting_counts`."""

    imbalance: NumberField = Field(default=1.0, ge=1.0)
    seed: SeedField = 0
    layers: LayersField = 4
    shape: LoadShape = LoadShape.RANKS
    drift: Annotated[Drift, _strict_numbers(RECORDED)] = RECORDED


class SimulationConfig(_Section):
    """Contents of a whole file."""

    version: Annotated[int, Field(strict=True)]
    cluster: ClusterSection | None = None
    model: ModelSection | None = None
    system: str = "plain"
    replica_slots: int | None = Field(default=None, strict=True, ge=0, le=INT32_MAX)
    migration: MigrationSection = MigrationSection()
    routing: RoutingSection = RoutingSection()
    step: StepSection = StepSection()


def preset_names(*sections: str) -> list[str]:
    """List the presets of the package, without `.yaml`."""
    found = [file for file in (resources.files(__package__) / "presets").iterdir() if file.name.endswith(".yaml")]
    if sections:
        keys = {file.name: {line.partition(":")[0] for line in file.read_text().splitlines()} for file in found}
        found = [file for file in found if keys[file.name].issuperset(sections)]
    return sorted(file.name.removesuffix(".yaml") for file in found)


def load_config(argument: str, source: str, *sections: str, limits: FileLimits = FileLimits()) -> SimulationConfig:
    """Read a configuration file or a preset."""
    data = _read(argument, source, sections, limits)
    missing = [section for section in sections if data.get(section) is None]
    if missing:
        raise ValueError(
            f"{argument} {source} has no {' and no '.join(missing)}; expected a .yaml file with it, or one of the "
            f"presets {', '.join(preset_names(*sections))}"
        )
    for section in ("cluster", "model"):
        if isinstance(data.get(section), str):
            data = data | {section: _of_preset(argument, source, section, data[section], limits)}
    try:
        config = SimulationConfig.model_validate(data)
        # `build` checks more than the types, so run it here to find mistakes before a simulation starts.
        parts = (config.cluster, config.model, config.migration, config.step)
        for part in parts:
            if part is not None:
                part.build()
        if config.model is not None and config.cluster is not None:
            config.step.parallel.build().share(config.model.build(), config.cluster.build())
    except ValidationError as error:
        raise ValueError(f"{argument} {source}: {_first(error)}") from error
    except ValueError as error:
        raise ValueError(f"{argument} {source}: {error}") from error
    return config


def _of_preset(argument: str, source: str, section: str, name: str, limits: FileLimits) -> Any:
    found = _read(f"{argument} {source}: {section}", name, (section,), limits).get(section)
    if found is None:
        raise ValueError(
            f"{argument} {source}: {section} is {shown(name)}; expected a preset with a {section}, one of "
            f"{', '.join(preset_names(section))}"
        )
    return found


def _read(argument: str, source: str, sections: tuple[str, ...], limits: FileLimits) -> dict[str, Any]:
    is_file = source.endswith((".yaml", ".yml")) or "/" in source
    if not is_file and source not in preset_names():
        known = preset_names(*sections)
        near = difflib.get_close_matches(source[:MOST_NAME], known, 3, 0.4)
        hint = f"near ones are {', '.join(near)}, " if near else ""
        raise ValueError(
            f"{argument} is {shown(source)}, no preset and no .yaml file; {hint}presets are {', '.join(known)}"
        )
    try:
        if is_file:
            data = read_yaml(Path(source), limits)
        else:
            with resources.as_file(resources.files(__package__) / "presets" / f"{source}.yaml") as preset:
                data = read_yaml(preset)
    except OSError as error:
        raise ValueError(f"{argument} is {source}: {error.strerror or error}; expected a .yaml file") from error
    except ValueError as error:
        raise ValueError(f"{argument} {source} {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{argument} {source} contains {type(data).__name__}; expected keys, the first one version")
    if "version" not in data:
        raise ValueError(f"{argument} {source}: version is missing; expected the key version: {VERSION}")
    if data["version"] != VERSION:
        raise ValueError(f"{argument} {source}: version is {shown(data['version'])}; expected {VERSION}")
    return data


def _first(error: ValidationError) -> str:
    """Describe the first validation error in one line with the path of the key."""
    found = error.errors()[0]
    parts = [f"[{part}]" if isinstance(part, int) else f".{part[:MOST_NAME]}" for part in found["loc"]]
    path = "".join(parts).lstrip(".")
    # Pydantic reports unknown keys of plain dataclasses, such as `Drift`, as `unexpected_keyword_argument`.
    if found["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{path} is unknown"
    if found["type"] == "missing":
        return f"{path} is missing"
    if found["type"] == "value_error":
        return f"{path} {found['ctx']['error']}"
    return f"{path} is {shown(found['input'])}: {found['msg'].lower()}"
