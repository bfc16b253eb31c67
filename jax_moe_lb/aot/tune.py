"""Search for the fastest form of a layer within a limit of memory.

A form is a system with compiler options. Every form is compiled with gradients for the mesh of the layer, and its time
is estimated by `ProgramReport.timeline`; nothing runs. The search changes one option at a time and keeps changes with a
gain, so it compiles about ten programs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial

import jax
from flax import nnx
from jaxtyping import Array, Float
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jax_moe_lb.aot.compiler_options import LATENCY_HIDING, compiler_options
from jax_moe_lb.aot.layer import LayerProgram
from jax_moe_lb.aot.load import DEFAULT_LOAD
from jax_moe_lb.aot.operation_time import rates_of
from jax_moe_lb.aot.report import console_of
from jax_moe_lb.core.checks import Count, check_value
from jax_moe_lb.layer.systems import System
from jax_moe_lb.transport.direct import Direct
from jax_moe_lb.transport.dispatch import Dispatch
from jax_moe_lb.transport.exchange import Saved
from jax_moe_lb.transport.forward import Forward
from jax_moe_lb.transport.once import Once
from jax_moe_lb.transport.replicate import Gather, PeerCopy

MORE_MEMORY = 1.05
"""Default limit of memory, relative to the layer's own form."""

LEAST_GAIN = 0.005
"""Least gain of a change, as a share of the step."""

LESS_OVERLAP = {"xla_tpu_scheduler_percent_shared_memory_limit": "3"}
"""Option of XLA on TPUs: share of the memory for overlap, in percent."""

DISPATCHES: tuple[type[Dispatch], ...] = (Direct, Once, Forward)
"""Dispatches of `dispatch_by_rule`; a system with another one keeps it."""

COLUMNS = 120

NOTE = "estimated from the compiled programs, not run"

Options = dict[str, str | bool]


@dataclass(frozen=True)
class TunedForm:
    """Form of a layer with its estimated step.

    Args:
        name: Changes to the layer's own form.
        system: System of the layer.
        compiler_options: Options of XLA beside those of `compiler_options`.
        step_s: Estimated seconds of a layer, forward and gradients.
        exposed_s: Seconds in which the compute stream runs or awaits communication.
        memory_bytes: Temporaries of a layer, and residuals of the other layers, of one device.
        residual_bytes: Residuals of one layer on one device in bytes, without the parameters.
        reason: Why the search kept or rejected it.
    """

    name: str
    system: System
    compiler_options: Options
    step_s: float
    exposed_s: float
    memory_bytes: int
    residual_bytes: int
    reason: str


@dataclass(frozen=True)
class Tuned:
    """Result of `tune`.

    Args:
        best: The fastest form.
        system: Its system, for `MoE(system=...)`.
        compiler_options: Its options for `jax.jit(..., compiler_options=...)` of the program with the layer.
        tried: All compiled forms in the order of the search; the first is the layer's own.
        rejected: Reasons of forms without a program, by name.
        memory_bytes: Limit of memory.
        layers: Number of layers of the stack.
        target: Name of the machine.
        load: Name of the load.
    """

    best: TunedForm
    system: System
    compiler_options: Options
    tried: tuple[TunedForm, ...]
    rejected: dict[str, str]
    memory_bytes: int
    layers: int
    target: str
    load: str


def tune(
    layer: nnx.Module,
    x: Float[Array, "*B H"] | jax.ShapeDtypeStruct,
    *,
    memory_bytes: int | None = None,
    layers: int = 1,
    load: str = DEFAULT_LOAD,
    progress: Callable[[str], None] = lambda line: None,
) -> Tuned:
    """Search for the fastest form of a layer within a limit of memory.

    The forms differ in dispatch, chunks, saved arrays, the loop of rounds if the system needs one round only, the
    scheduler of the compiler, and on NVIDIA GPUs the transport of weights. The library chooses kernels for each of
    them. Every form computes equal values, up to rounding. Compiling a form takes 10 to 30 seconds, and no program
    runs.

    Saved arrays are residuals: a stack of layers without rematerialization stores them once per layer. Pass the number
    of layers whose residuals exist at the same time. With `jax.checkpoint` around each layer it is 1, and saved arrays
    save time only if the policy contains their names.

    Args:
        layer: An `nn.MoE`, on devices or abstract, as `nnx.eval_shape` returns it on the mesh of a `Target`.
        x: `[..., H]` tokens of all ranks, of which only shape, dtype and sharding are read.
        memory_bytes: Limit of memory of one device in bytes: temporaries of a layer, and residuals of the other layers.
            None (default) is 5 % more than the layer's own form takes.
        layers: Number of layers of the stack; 1 by default.
        load: Load of the timeline, see `counts_of`; `zipf:1.0` by default.
        progress: Function of the name of a form, called before its compilation; does nothing by default.

    Returns:
        The system and the compiler options of the fastest form, and all forms with the reasons of the choice.

    Raises:
        ValueError: There are no rates of the devices, the router does not state its experts per token, or no form fits
            into `memory_bytes`.

    Examples:
        With the TPU compiler installed (`pip install '.[tpu]'` in a checkout):

        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> from jax_moe_lb import ExpertConfig, MoE, TopK
        >>> from jax_moe_lb.aot import Target, print_tuned, tune, use_no_accelerators
        >>> use_no_accelerators()  # doctest: +SKIP
        >>> mesh = Target.parse("v5e:2x4").mesh()  # doctest: +SKIP
        >>> def make():
        ...     return MoE(2048, 128, TopK(8), mesh=mesh, experts=ExpertConfig(768), rngs=nnx.Rngs(0))
        >>> x = jax.ShapeDtypeStruct((8 * 4096, 2048), jnp.bfloat16)
        >>> tuned = tune(nnx.eval_shape(make), x, layers=4)  # doctest: +SKIP
        >>> print_tuned(tuned)  # doctest: +SKIP
    """
    check_value("layers", layers, Count)
    check_value("memory_bytes", memory_bytes, Count | None)
    program = LayerProgram(layer, x, load)
    rates_of(program.target)
    search = _Search(program, layers, memory_bytes, progress)
    best = search.run()
    return Tuned(
        best=best,
        system=best.system,
        compiler_options=compiler_options(program.mesh, best.compiler_options),
        tried=tuple(search.tried),
        rejected=search.rejected,
        memory_bytes=search.limit,
        layers=layers,
        target=program.target.name,
        load=load,
    )


Change = Callable[[System], System | Options | None]
"""Function from a system to a changed one or to compiler options; None if the change does not apply."""


def _two_chunks(system: System) -> System | None:
    dispatch = system.dispatch
    if not dispatch.takes_chunks or dispatch.buffers.chunks > 1:
        return None
    return system.replace(buffers=replace(dispatch.buffers, chunks=2))


def _save(name: str, system: System) -> System | None:
    dispatch = system.dispatch
    if not dispatch.takes_saved or getattr(dispatch.saved, name) or (name == "replicas" and not system.replica_slots):
        return None
    return system.replace(saved=replace(dispatch.saved, **{name: True}))


def _by_peer_copies(system: System) -> System | None:
    if system.replicate != Gather() or not system.replica_slots:
        return None
    return replace(system, replicate=PeerCopy())


@dataclass
class _Search:
    """Greedy search over changes of a form."""

    program: LayerProgram
    layers: int
    memory_bytes: int | None
    progress: Callable[[str], None]
    tried: list[TunedForm] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)
    limit: int = 0

    def run(self) -> TunedForm:
        """Return the fastest form from all starts."""
        own = self._compiled("own form", self.program.layer.system, {})
        self.limit = self.memory_bytes or int(MORE_MEMORY * own.memory_bytes)
        self.tried.append(replace(own, reason="given"))
        ends = [self._walk(own)]
        for kind in self._dispatches():
            # No start is compared alone: chunks and saved arrays apply to some dispatches only.
            changed = replace(own.system, dispatch=kind(own.system.dispatch.buffers, own.system.dispatch.transfer))
            start = self._tried(kind.__name__, changed, {}, None)
            ends += [] if start is None else [self._walk(start)]
        best = min(ends, key=self._rank)
        if best.memory_bytes > self.limit:
            raise ValueError(f"memory_bytes is {self.limit}; expected at least {best.memory_bytes}, with {best.name}")
        return best

    def _dispatches(self) -> Iterator[type[Dispatch]]:
        own = type(self.program.layer.system.dispatch)
        levels = len(self.program.topology.levels)
        for kind in DISPATCHES if own in DISPATCHES else ():
            if kind is not own and (kind is not Forward or levels > 1):
                yield kind

    def _walk(self, best: TunedForm) -> TunedForm:
        for name, change in self._changes():
            found = None
            changed = change(best.system)
            if isinstance(changed, System):
                found = self._tried(_joined(best, name), changed, best.compiler_options, best)
            elif changed is not None:
                found = self._tried(_joined(best, name), best.system, best.compiler_options | changed, best)
            if found is not None and self._is_better(found, best):
                best = found
        if self.program.target.platform == "tpu" and best.memory_bytes > self.limit:
            options = best.compiler_options | LESS_OVERLAP
            found = self._tried(_joined(best, "less overlap"), best.system, options, best)
            best = best if found is None else min(best, found, key=self._rank)
        return best

    def _changes(self) -> Iterator[tuple[str, Change]]:
        yield "one round", self._one_round
        if self.program.target.platform == "cuda":
            yield "latency hiding", lambda _: {LATENCY_HIDING: True}
        yield "two chunks", _two_chunks
        for saved in fields(Saved):
            yield f"saved {saved.name}", partial(_save, saved.name)
        if self.program.target.platform == "cuda":
            # After the options that hide or save exchanges of weights: the copies replace these.
            yield "peer copies of weights", _by_peer_copies

    def _one_round(self, system: System) -> System | None:
        sizes, buffers = self.program.sizes, system.dispatch.buffers
        bound = system.max_rounds_bound(self.program.topology, sizes.experts, sizes.tokens * sizes.per_token)
        if buffers.max_rounds is not None or bound > 1:
            return None
        return system.replace(buffers=replace(buffers, max_rounds=1))

    def _tried(self, name: str, system: System, options: Options, before: TunedForm | None) -> TunedForm | None:
        try:
            found = self._compiled(name, system, options)
        except ValueError as error:
            self.rejected[name] = str(error)
            return None
        found = replace(found, reason=self._reason(found, before))
        self.tried.append(found)
        return found

    def _compiled(self, name: str, system: System, options: Options) -> TunedForm:
        self.progress(name)
        report = self.program.compile(system, options)
        timeline = report.timeline(self.program.load_of(system))
        residual_bytes = self.program.residual_bytes(system)
        memory_bytes = report.temp_bytes + (self.layers - 1) * residual_bytes
        return TunedForm(name, system, options, timeline.total_s, timeline.exposed_s, memory_bytes, residual_bytes, "")

    def _reason(self, found: TunedForm, before: TunedForm | None) -> str:
        if found.memory_bytes > self.limit:
            return f"{found.memory_bytes / self.limit - 1:.1%} above the limit of memory"
        if before is None:
            return "another dispatch"
        gain = 1 - found.step_s / before.step_s
        if self._is_better(found, before):
            return f"kept: saves {gain:.1%} of a step"
        return f"saves {gain:.1%} only" if gain >= 0 else f"takes {-gain:.1%} longer"

    def _is_better(self, found: TunedForm, best: TunedForm) -> bool:
        if max(found.memory_bytes, best.memory_bytes) > self.limit:
            return self._rank(found) < self._rank(best)
        return found.step_s < (1 - LEAST_GAIN) * best.step_s

    def _rank(self, form: TunedForm) -> tuple[int, float]:
        """Sort key: fitting forms by time, then the others by memory."""
        return max(0, form.memory_bytes - self.limit), form.step_s


def _joined(form: TunedForm, name: str) -> str:
    return name if form.name == "own form" else f"{form.name}, {name}"


def print_tuned(tuned: Tuned, console: Console | None = None) -> None:
    """Print all forms with the reasons of the choice, and the code of the fastest one.

    Args:
        tuned: Result of `tune`.
        console: Console to print to; stdout by default, with at least 120 columns.

    Examples:
        >>> from jax_moe_lb.aot import print_tuned, tune
        >>> print_tuned(tune(layer, x))  # doctest: +SKIP
    """
    console = console_of(console, COLUMNS)
    console.print(_table(tuned))
    for name, reason in tuned.rejected.items():
        console.print(escape(f"{name} does not compile: {reason}"), soft_wrap=True)
    for line in usage_lines(tuned):
        console.print(escape(line), soft_wrap=True)


def usage_lines(tuned: Tuned) -> list[str]:
    """Format the fastest form as Python."""
    parts = f"replicate={tuned.system.replicate!r}, dispatch={tuned.system.dispatch!r}"
    return [
        f"fastest: {tuned.best.name}",
        f"    system = dataclasses.replace(system, {parts})",
        f"    step = jax.jit(step, compiler_options={tuned.compiler_options!r})",
    ]


def _table(tuned: Tuned) -> Table:
    limit = f"limit {tuned.memory_bytes / 1e6:.0f} MB for {tuned.layers} layer{'s' * (tuned.layers > 1)}"
    table = Table(
        title=escape(f"forms on {tuned.target}, {tuned.load}, {limit}"), title_justify="left", box=SIMPLE_HEAD
    )
    table.caption, table.caption_justify = NOTE, "left"
    for header in ("step ms", "exposed ms", "memory MB", "of a further layer MB"):
        table.add_column(header, justify="right")
    table.add_column("form", overflow="fold")
    table.add_column("reason", overflow="fold")
    for form in tuned.tried:
        times = (f"{form.step_s * 1e3:.2f}", f"{form.exposed_s * 1e3:.2f}")
        memory = (f"{form.memory_bytes / 1e6:.0f}", f"{form.residual_bytes / 1e6:.0f}")
        mark = "> " if form == tuned.best else "  "
        table.add_row(*times, *memory, escape(mark + form.name), escape(form.reason))
    return table
