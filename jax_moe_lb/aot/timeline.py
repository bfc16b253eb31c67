"""Timeline of one device in one run of a compiled program, with estimated times.

Operations of the compute stream run in the order of the schedule. An asynchronous operation starts when the compute
stream reaches it and its own stream is free; the compute stream waits at its end. XLA runs one exchange at a time, so
all exchanges share a stream. The time of the compute stream is the time of the program: each of its seconds belongs to
an operation, or to the operation that it waits for.

**All times are estimated from the compiled program**, which has not run; see `core/device_rates.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from jax_moe_lb.aot.load import LayerLoad
from jax_moe_lb.aot.operation_time import COMMUNICATION, OperationTime
from jax_moe_lb.aot.schedule import Kind, Loop, ScheduledOperation
from jax_moe_lb.aot.targets import Target

COMPUTE, EXCHANGES, ENGINES = "compute", "exchanges", "copy engines"
"""Streams of a device."""

EXCHANGING = frozenset({Kind.EXCHANGE, Kind.COLLECTIVE})
"""Kinds that share the stream of exchanges, also if the compute stream waits for them."""

WAIT = "wait for "
"""Start of the name of a wait."""

NEAR_MEAN = 1.01
"""Imbalance up to which the first plans of `exact` reached the mean; `eps` of 0.01 then allows so much."""


@dataclass(frozen=True)
class Span:
    """Operation, or wait of the compute stream, with its estimated time.

    Args:
        name: Name in the compiled program.
        kind: Kind of the operation, of the awaited one for a wait.
        stage: Named scope.
        stream: Stream on which it runs.
        start_s: Start in seconds.
        end_s: End in seconds; for a loop of `times` iterations, of all of them.
        bound: Bottleneck: `FLOPs`, `HBM`, `launch`, `blocks`, `link`, `network`, `updates`, `rows`, `latency`
            or `host`.
        times: Number of executions.
    """

    name: str
    kind: Kind
    stage: str
    stream: str
    start_s: float
    end_s: float
    bound: str
    times: int = 1

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_s - self.start_s

    @property
    def is_communication(self) -> bool:
        """Whether it moves data between devices."""
        return self.kind in COMMUNICATION


@dataclass(frozen=True)
class Timeline:
    """Spans of one device in one run of a program, estimated from the compiled program.

    Args:
        target: Name of the machine.
        load: Name of the load.
        rounds: Rounds of the receive buffer under the load.
        spans: Operations and waits in the order of the schedule.
    """

    target: str
    load: str
    rounds: int
    spans: tuple[Span, ...] = field(repr=False)

    @property
    def total_s(self) -> float:
        """Seconds of the program."""
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def exposed_s(self) -> float:
        """Seconds in which the compute stream runs or awaits communication."""
        return sum(span.seconds for span in self.compute if span.is_communication)

    @property
    def compute(self) -> list[Span]:
        """Spans of the compute stream."""
        return [span for span in self.spans if span.stream == COMPUTE]

    @property
    def hidden_s(self) -> float:
        """Seconds of communication that run beside other operations."""
        moves = [span for span in self.spans if span.is_communication]
        busy = sum(span.seconds for span in moves if span.stream != COMPUTE)
        waits = sum(span.seconds for span in moves if span.stream == COMPUTE and span.name.startswith(WAIT))
        return max(busy - waits, 0.0)

    def stages(self) -> dict[str, float]:
        """Sum the seconds of the compute stream by stage, largest first."""
        return _sums((span.stage, span.seconds) for span in self.compute)

    def bounds(self) -> dict[str, float]:
        """Sum the seconds of the compute stream by bottleneck, largest first."""
        return _sums((span.bound, span.seconds) for span in self.compute)


def timeline(schedule: tuple[ScheduledOperation, ...], target: Target, load: LayerLoad | None = None) -> Timeline:
    """Estimate the timeline of a schedule."""
    if target.num_slices > 1:
        raise ValueError(f"target is {target.name}; expected one slice, as transfers between slices have no rates")
    # On tpu7x, exchanges become other operations, and a timeline without them would be too short.
    if load is not None and target.platform == "tpu" and load.plan.num_ranks > 1 and not _exchanges(schedule):
        raise ValueError(
            f"target is {target.name}; expected one whose compiler keeps ragged exchanges, such as v6e:2x4"
        )
    walk = _Walk(OperationTime(target, load))
    walk.run(schedule, 0)
    return Timeline(target.name, load.name if load else "full buffers", load.rounds if load else 1, tuple(walk.spans))


def _exchanges(schedule: tuple[ScheduledOperation, ...]) -> bool:
    """Return whether a schedule has an exchange of rows."""
    return any(one.kind is Kind.EXCHANGE or _exchanges(one.body) for one in schedule)


def _sums(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, seconds in pairs:
        found[name] = found.get(name, 0.0) + seconds
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


@dataclass
class _Walk:
    """Clock per stream while a schedule runs."""

    time: OperationTime
    now: float = 0.0
    spans: list[Span] = field(default_factory=list)
    last: dict[str, Span] = field(default_factory=dict)
    running: dict[str, Span] = field(default_factory=dict)

    def run(self, operations: tuple[ScheduledOperation, ...], i: int) -> None:
        for one in operations:
            if one.kind is Kind.LOOP:
                self._loop(one, i)
            elif one.kind is Kind.WAIT:
                self._wait(one.awaits)
            elif one.kind is Kind.JOIN:
                stream = one.stream or ENGINES
                for name in [name for name, span in self.running.items() if span.stream == stream]:
                    self._wait(name)
            else:
                self._start(one, i)

    def _start(self, one: ScheduledOperation, i: int) -> None:
        found = self.time.of(one, i)
        stream = _stream(one)
        # An exchange on the compute stream waits for the exchange before it, too.
        shared = EXCHANGES if one.kind in EXCHANGING and stream == COMPUTE else stream
        before = self.last.get(shared)
        if stream == COMPUTE:
            self._until(before)
        begin = max(self.now, before.end_s if before else 0.0)
        span = Span(one.name, one.kind, one.stage, stream, begin, begin + found.seconds, found.bound)
        self.spans.append(span)
        self.last[shared] = span
        if stream == COMPUTE:
            self.now = span.end_s
        else:
            self.running[one.name] = span

    def _wait(self, name: str) -> None:
        self._until(self.running.pop(name, None))

    def _until(self, span: Span | None) -> None:
        """Let the compute stream wait for the end of an operation of another stream."""
        if span is not None and span.end_s > self.now:
            self.spans.append(replace(span, name=WAIT + span.name, stream=COMPUTE, start_s=self.now))
            self.now = span.end_s

    def _loop(self, one: ScheduledOperation, i: int) -> None:
        load = self.time.load
        if one.loop is Loop.ROUNDS:
            rounds = load.rounds if load else 1
            # The loop around the loop of rounds, for wide sums, has one step.
            around = any(inner.loop is Loop.ROUNDS for inner in one.body)
            for later in range(1, min(rounds, 2) if around else rounds):
                self._host_waits(one, 1)
                self.run(one.body, later)
            self._host_waits(one, 1)
            return
        trips = one.trips
        if one.loop is Loop.REPLICAS and load is not None:
            trips = int(load.replicas.sum((1, 2)).max(initial=0))
        if one.loop is Loop.SEARCH and load is not None and load.imbalance <= NEAR_MEAN:
            trips = 0
        # The host reads the condition of a loop before every iteration and at the end.
        self._host_waits(one, 1 if one.loop is Loop.BRANCH else trips + 1)
        if trips:
            self._repeat(one.body, i, trips)

    def _repeat(self, body: tuple[ScheduledOperation, ...], i: int, trips: int) -> None:
        """Run a body once, and stretch its time to all iterations."""
        start, before, earlier = self.now, len(self.spans), dict(self.last)
        self.run(body, i)
        if trips == 1:
            return

        def later(moment: float) -> float:
            return start + (moment - start) * trips if moment > start else moment

        def stretched(span: Span) -> Span:
            return replace(span, start_s=later(span.start_s), end_s=later(span.end_s), times=span.times * trips)

        self.spans[before:] = map(stretched, self.spans[before:])
        # An exchange that started before the loop runs once beside it.
        self.last = {
            stream: span if span is earlier.get(stream) else stretched(span) for stream, span in self.last.items()
        }
        self.now = later(self.now)

    def _host_waits(self, one: ScheduledOperation, times: int) -> None:
        if one.waits_for_host:
            end = self.now + times * self.time.machine.rates.host_wait
            self.spans.append(Span(one.name, Kind.LOOP, one.stage, COMPUTE, self.now, end, "host", times))
            self.now = end


def _stream(one: ScheduledOperation) -> str:
    if not one.runs_beside:
        return COMPUTE
    if one.kind is Kind.COPIES:
        return ENGINES
    if one.kind in COMMUNICATION or one.stream == "collective":
        return EXCHANGES
    return one.stream or one.kind.value
