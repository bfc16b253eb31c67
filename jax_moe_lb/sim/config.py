"""`load_config` reads files that describe a machine, a model and a system, and the presets among them.

A file is YAML with `version: 1` and some of `cluster`, `model`, `system`, `migration`, `routing`, `step`. `cluster` and
`model` may name a preset instead. `docs/simulator.md` has the format.
"""

import difflib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from jax_moe_lb.checks import INT32_MAX
from jax_moe_lb.sim import units
from jax_moe_lb.sim.cluster import Cluster, Links
from jax_moe_lb.sim.communication import Communication
from jax_moe_lb.sim.drift import RECORDED, Drift
from jax_moe_lb.sim.gemm import AnalyticGemm, Gemm, MeasuredGemm
from jax_moe_lb.sim.limits import MOST_LAYERS, MOST_POINTS, MOST_WIDTH, shown
from jax_moe_lb.sim.loads import LoadShape
from jax_moe_lb.sim.model import ModelShape
from jax_moe_lb.sim.parallel import Parallel, Peers
from jax_moe_lb.sim.schedule import Step
from jax_moe_lb.sim.work import Migration
from jax_moe_lb.sim.yaml_file import read_yaml
from jax_moe_lb.topology import LEVEL_NAMES
from jax_moe_lb.transport.codec import Codec, CodecBase

VERSION = 1
"""The format has this version. Files of another one are refused."""

MOST_NAME = 60
"""Messages show so much of a key, and so much of a name is compared with those of presets."""

Size = Annotated[float, BeforeValidator(units.size)]
Rate = Annotated[float, BeforeValidator(units.rate)]
Time = Annotated[float, BeforeValidator(units.time)]
Speed = Annotated[float, BeforeValidator(units.speed)]
Count = Annotated[int, Field(strict=True, ge=1, le=INT32_MAX)]
"""Planners count in int32, so no number of anything is larger."""

Layers = Annotated[int, Field(strict=True, ge=1, le=MOST_LAYERS)]
Width = Annotated[int, Field(strict=True, ge=1, le=MOST_WIDTH)]
Rows = Annotated[float, Field(ge=0, le=INT32_MAX)]


class _Section(BaseModel):
    """A section refuses keys that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LevelSection(_Section):
    """This section has one level of links; see `Links`."""

    name: Literal["dc", "node", "gpu"]
    size: Count
    rate: Rate
    links: Count = 1
    latency: Time = 0.0


class GemmSection(_Section):
    """This section has a curve (`rows` and `speeds`) or the analytic model (`peak` and `half_rows`)."""

    rows: tuple[Rows, ...] | None = Field(default=None, max_length=MOST_POINTS)
    speeds: tuple[Speed, ...] | None = Field(default=None, max_length=MOST_POINTS)
    peak: Speed | None = None
    half_rows: Rows = 0.0
    launch: Time = 0.0

    def build(self) -> Gemm:
        """Makes the curve, or the analytic model.

        Raises:
            ValueError: the section has neither, or both.
        """
        if self.rows is not None and self.speeds is not None and self.peak is None:
            return MeasuredGemm(self.rows, self.speeds, self.launch)
        if self.peak is not None and self.rows is None and self.speeds is None:
            return AnalyticGemm(self.peak, self.half_rows, self.launch)
        raise ValueError("gemm has neither one; expected rows and speeds, or peak and half_rows")


class ClusterSection(_Section):
    """This section has a machine; see `Cluster`."""

    levels: tuple[LevelSection, ...] = Field(max_length=len(LEVEL_NAMES))
    gemm: GemmSection
    compute: Speed
    copy_engines: Rate | None = None
    planner: Time = 0.0
    domain_level: Literal["dc", "node", "gpu"] | None = None
    memory: Size | None = None
    hbm: Rate | None = None
    communication: Communication = Communication()
    jitter: float = 0.0
    jitter_seed: int = Field(default=0, ge=0, lt=2**64)

    def build(self) -> Cluster:
        """Makes the machine."""
        return Cluster(
            levels=tuple(Links(at.name, at.size, at.rate, at.links, at.latency) for at in self.levels),
            gemm=self.gemm.build(),
            flops_per_s=self.compute,
            copy_bytes_per_s=self.copy_engines,
            planner_s=self.planner,
            domain_level=self.domain_level,
            memory_bytes=self.memory,
            hbm_bytes_per_s=self.hbm,
            communication=self.communication,
            jitter=self.jitter,
            jitter_seed=self.jitter_seed,
        )


class ModelSection(_Section):
    """This section has a model; see `ModelShape`."""

    layers: Layers
    hidden: Width
    inner: Width
    experts: Count
    per_token: Count
    tokens: Count
    itemsize: Count = 2
    gradient_itemsize: Count = 4
    gated: bool = True
    pre_expert: Time | None = None
    sequence: Count = 4096
    other: Time = 0.0
    shared_inner: int = Field(default=0, strict=True, ge=0, le=MOST_WIDTH)

    def build(self) -> ModelShape:
        """Makes the model."""
        fields = self.model_dump()
        return ModelShape(**fields | {"pre_expert_s": fields.pop("pre_expert"), "other_s": fields.pop("other")})


class MigrationSection(_Section):
    """This section has the gathers of expert domains; see `Migration`."""

    domain_sizes: tuple[Count, ...] = Field(default=(), max_length=len(LEVEL_NAMES))
    ratio: float = 1.0
    base: CodecBase = CodecBase.SHARED
    gather_again: bool = False

    def build(self) -> Migration:
        """Makes the migration."""
        return Migration(self.domain_sizes, Codec(self.ratio, self.base), self.gather_again)


class PeersSection(_Section):
    """This section has the ranks of a group beside the expert-parallel one; see `Peers`."""

    size: Count
    rate: Rate | None = None
    latency: Time = 0.0

    def build(self) -> Peers:
        """Makes the group."""
        return Peers(self.size, self.rate, self.latency)


ALONE = PeersSection(size=1)


class ParallelSection(_Section):
    """This section has the groups beside the expert-parallel one; see `Parallel`."""

    tensor: PeersSection = ALONE
    data: PeersSection = ALONE
    pipeline: PeersSection = ALONE
    microbatches: Count = 1
    interleave: Count = 1

    def build(self) -> Parallel:
        """Makes the groups."""
        groups = (self.tensor.build(), self.data.build(), self.pipeline.build())
        return Parallel(*groups, self.microbatches, self.interleave)


class StepSection(_Section):
    """This section says which passes a step has; see `Step`."""

    backward: bool = True
    recompute: bool = True
    exchange_counts: bool = True
    optimizer_bytes: float | None = Field(default=None, ge=0.0, le=1000.0)
    parallel: ParallelSection = ParallelSection()

    def build(self) -> Step:
        """Makes the passes."""
        return Step(**dict(self) | {"parallel": self.parallel.build()})


class RoutingSection(_Section):
    """This section says which counts are drawn where no trace is given; see `drifting_counts`."""

    imbalance: float = Field(default=1.0, ge=1.0)
    seed: int = Field(default=0, ge=0, lt=2**64)
    layers: Layers = 4
    shape: LoadShape = LoadShape.RANKS
    drift: Drift = RECORDED


class Config(_Section):
    """A config is a whole file."""

    version: int
    cluster: ClusterSection | None = None
    model: ModelSection | None = None
    system: str = "plain"
    replica_slots: int | None = Field(default=None, strict=True, ge=0, le=INT32_MAX)
    migration: MigrationSection = MigrationSection()
    routing: RoutingSection = RoutingSection()
    step: StepSection = StepSection()


def preset_names() -> list[str]:
    """Lists the files that come with the package, without `.yaml`."""
    found = (resources.files(__package__) / "presets").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in found if file.name.endswith(".yaml"))


def load_config(argument: str, source: str) -> Config:
    """Reads a file, or a preset by its name.

    Args:
        argument: what messages call it.
        source: a path that ends in `.yaml` or `.yml`, or contains a `/`; else the name of a preset.

    Raises:
        ValueError: there is no such file or preset, or what it says is not understood; the message names the key.
    """
    data = _read(argument, source)
    for section in ("cluster", "model"):
        if isinstance(data.get(section), str):
            data = data | {section: _of_preset(argument, source, section, data[section])}
    try:
        config = Config.model_validate(data)
        # What the sections make checks more than their types: mistakes shall be found before anything runs.
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


def _of_preset(argument: str, source: str, section: str, name: str) -> Any:
    found = _read(f"{argument} {source}: {section}", name).get(section)
    if found is None:
        raise ValueError(f"{argument} {source}: {section} is {shown(name)}, a preset without one")
    return found


def _read(argument: str, source: str) -> dict[str, Any]:
    is_file = source.endswith((".yaml", ".yml")) or "/" in source
    if not is_file and source not in preset_names():
        near = difflib.get_close_matches(source[:MOST_NAME], preset_names(), 3, 0.4)
        hint = f"near ones are {', '.join(near)}, " if near else ""
        raise ValueError(
            f"{argument} is {shown(source)}, no preset and no .yaml file; {hint}presets are {', '.join(preset_names())}"
        )
    try:
        if is_file:
            data = read_yaml(Path(source))
        else:
            with resources.as_file(resources.files(__package__) / "presets" / f"{source}.yaml") as preset:
                data = read_yaml(preset)
    except OSError as error:
        raise ValueError(f"{argument} is {source}: {error.strerror or error}; expected a .yaml file") from error
    except ValueError as error:
        raise ValueError(f"{argument} {source} {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{argument} {source} holds {type(data).__name__}; expected keys, the first of them version")
    if data.get("version") != VERSION:
        raise ValueError(f"{argument} {source}: version is {shown(data.get('version'))}; expected {VERSION}")
    return data


def _first(error: ValidationError) -> str:
    """Says what is wrong first, in one line with the key's path."""
    found = error.errors()[0]
    parts = [f"[{part}]" if isinstance(part, int) else f".{part[:MOST_NAME]}" for part in found["loc"]]
    path = "".join(parts).lstrip(".")
    # The latter of dataclasses that are no section of their own.
    if found["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{path} is unknown"
    if found["type"] == "missing":
        return f"{path} is missing"
    if found["type"] == "value_error":
        return f"{path} {found['ctx']['error']}"
    return f"{path} is {shown(found['input'])}: {found['msg'].lower()}"
