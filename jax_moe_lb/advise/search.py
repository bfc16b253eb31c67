"""Search for the fastest choices of a `Space`.

The search has three stages. On the workload of the first shape, it simulates one layer of the first choices of the
space. Then it repeatedly simulates all neighbors of the fastest families, until no neighbor is faster. On the other
shapes it continues from the fastest families of the shapes before, without choices `FAR` slower than the fastest one.
A choice of several rounds is tried with larger receive buffers, too. The best one gets the next larger buffer if
rounds on unseen workloads would cost more.
The second stage simulates one layer of the fastest choices on every shape. The third stage simulates whole steps of the
best ones on all workloads, without families `FAR` slower than the fastest. A choice with a lower bound above the time
of others is not simulated. The first two stages are a heuristic: a choice that is slow on the first workloads is not
simulated on the others.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jax_moe_lb.advise.choice import Choice
from jax_moe_lb.advise.evaluate import Evaluator, Workload
from jax_moe_lb.advise.fit import fits_in_memory, needs
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.run import Report, mean_report

SLOTS = (1, 2, 4, 8)
"""Numbers of replica slots tried, as far as `E - L` allows."""

EPS = (None, 0.05)
"""Values of `eps` tried for `Exact`: its default 0.01, and a larger one."""

BALANCED = ("greedy", "exact", "ultraep")
"""Systems planning quotas, tried in all compositions."""

PUBLISHED = ("eplb_plus", "fastermoe", "feplb")
"""Systems tried without compositions."""

HISTORICAL = ("eplb", "lplb")
"""Systems that plan from earlier steps, tried without compositions if these steps are known."""


@dataclass(frozen=True)
class Space:
    """All choices that may help on a machine."""

    cluster: Cluster  # machine
    most_slots: int  # maximum number of replica slots of a rank, at most `E - L`; 0 for no replicas
    # If True (default), include systems that plan. If False, as for unknown counts, include plain and expert domains
    # only.
    planned: bool = True
    # If True (default), include `exact`. Without the planning module, each of its trials compiles a program, which is
    # too slow.
    with_exact: bool = True
    with_relocation: bool = True  # if True (default), workloads have earlier loads, so include relocation
    ratio: float = 1.0  # compression ratio of gathered experts; 1 (default) for none
    # If True, the machine is a sample of a larger one, and expert domains must leave several groups in it. False by
    # default.
    sampled: bool = False
    # If True, workloads have steps before them, so include balancers with history. False by default.
    with_history: bool = False

    @property
    def slots(self) -> tuple[int, ...]:
        """Numbers of replica slots to try."""
        return tuple(slots for slots in SLOTS if slots <= self.most_slots)

    @property
    def alone(self) -> tuple[str, ...]:
        """Systems tried without compositions."""
        return (*PUBLISHED, *HISTORICAL) if self.with_history else PUBLISHED

    @property
    def has_rails(self) -> bool:
        """True if tokens have several rails: between nodes with several links."""
        topology = self.cluster.topology()
        return topology.num_ranks > topology.ranks_per_node and topology.rails_per_node > 1

    def domain_sizes(self) -> list[tuple[int, ...]]:
        """List the expert-domain sizes: all combinations of divisors of the levels, except the one without a gather."""
        divisors = [[n for n in range(1, level.size + 1) if level.size % n == 0] for level in self.cluster.levels]
        if self.sampled:
            # A single domain over the whole sample would leave no exchange of tokens.
            divisors[0].pop()
        return [sizes for sizes in itertools.product(*divisors) if max(sizes) > 1]

    def first(self) -> list[Choice]:
        """List the initial choices: every system alone, and plain and one other in every size of expert domains."""
        slots = min(2, self.most_slots) if self.planned else 0
        systems = [Choice(name, slots) for name in (*BALANCED, *self.alone)] if slots else []
        best = Choice("exact" if self.with_exact else "greedy", slots)
        inside = [Choice(), best] if slots else [Choice()]
        gathered = [replace(one, domain_sizes=s, ratio=self.ratio) for s in self.domain_sizes() for one in inside]
        others = [replace(one, sprayed=True) for one in inside] + [replace(one, relocated=True) for one in inside]
        found = [Choice(), *systems, *others, *gathered]
        return [choice for choice in found if choice in self]

    def every(self) -> Iterator[Choice]:
        """Yield all choices of the space, usually hundreds; a search simulates only some."""
        flags = (False, True)
        for name, sizes in itertools.product(("plain", *BALANCED, *self.alone), [(), *self.domain_sizes()]):
            ratio = self.ratio if sizes else 1.0
            for slots, eps in itertools.product(self.slots if name != "plain" else (0,), EPS):
                for relayed, sprayed, relocated in itertools.product(flags, flags, flags):
                    choice = Choice(name, slots, eps, relayed, sprayed, relocated, sizes, ratio)
                    yield from (one for one in (choice, *choice.with_more_room) if one in self)

    def with_headroom(self, choice: Choice) -> list[Choice]:
        """List the choices differing in the headroom of the receive buffer alone, ascending."""
        return [other for other in (*choice.with_less_room, *choice.with_more_room) if other in self]

    def near(self, choice: Choice) -> list[Choice]:
        """List the choices differing in one part, or in one level's size of expert domains."""
        slots = choice.replica_slots or min(2, self.most_slots)
        found = [replace(choice, system=name, replica_slots=slots, eps=None, relayed=False) for name in BALANCED]
        found.append(replace(choice, system="plain", replica_slots=0, eps=None, relayed=False))
        found += [replace(choice, replica_slots=slots) for slots in self.slots if choice.replica_slots]
        found += [replace(choice, eps=eps) for eps in EPS]
        found += self.with_headroom(choice)
        found.append(replace(choice, relayed=not choice.relayed))
        found += [replace(choice, sprayed=not choice.sprayed), replace(choice, relocated=not choice.relocated)]
        sizes = choice.domain_sizes or (1,) * len(self.cluster.levels)
        for other in [*self.domain_sizes(), (1,) * len(sizes)]:
            if sum(a != b for a, b in zip(sizes, other, strict=True)) == 1:
                gathers = max(other) > 1
                found.append(
                    replace(choice, domain_sizes=other if gathers else (), ratio=self.ratio if gathers else 1.0)
                )
        return [other for other in dict.fromkeys(found) if other != choice and other in self]

    def __contains__(self, choice: Choice) -> bool:
        """Return whether a choice may help on this machine and is supported by the library."""
        if choice.system == "plain":
            fits = not choice.replica_slots and not choice.relayed
        else:
            fits = choice.replica_slots in self.slots
        fits &= choice.system in ("plain", *BALANCED, *self.alone)
        is_exact = choice.system == "exact"
        fits &= self.with_exact or not is_exact
        fits &= choice.eps is None or is_exact
        # UltraEP has relays of its own, and published systems stay unchanged.
        fits &= not choice.relayed or choice.system in ("greedy", "exact")
        composed = choice.sprayed or choice.relocated or bool(choice.domain_sizes)
        fits &= not composed or choice.system in ("plain", *BALANCED)
        fits &= self.planned or (choice.system == "plain" and not choice.sprayed)
        # Under uniform routing, one round suffices.
        fits &= choice.headroom is None or (self.planned and choice.system in ("plain", *BALANCED))
        fits &= not choice.sprayed or self.has_rails
        # Relocation with expert domains has no test in the library, so it is not recommended.
        fits &= not choice.relocated or (self.with_relocation and not choice.domain_sizes)
        return bool(fits)


FAMILIES = 4
"""Number of best families whose neighbors are tried; the members of a family differ in slots, `eps`, relays and
headroom.
"""

MOST_MOVES = 8
"""Maximum number of iterations over neighbors; three or four are usual."""

FINALISTS = 8
"""Maximum number of families simulated with whole steps on all workloads."""

FAR = 1.1
"""Time of one layer over the fastest choice's from which a choice is not simulated further."""


ROUND_SHARE = 0.1
"""Time of one more round over that of a layer, if no workload had one."""


@dataclass(frozen=True)
class SearchResult:
    """Choice with the simulated times of its whole steps."""

    choice: Choice  # simulated choice
    report: Report  # mean report over all workloads
    times_s: tuple[float, ...]  # seconds of a step on each workload, in the order of the workloads

    @property
    def median_s(self) -> float:
        """Median seconds over workloads."""
        return float(np.median(self.times_s))

    def ratios(self, other: "SearchResult") -> tuple[float, ...]:
        """Return the ratio of its time to another result's, per workload."""
        # Two times of 0 are equal.
        return tuple(mine / its if its else 1.0 for mine, its in zip(self.times_s, other.times_s, strict=True))

    def is_like(self, other: "SearchResult") -> bool:
        """Return whether the range of the ratios includes 1: each result is as fast as the other on some workload."""
        ratios = self.ratios(other)
        return min(ratios) <= 1 <= max(ratios)


@dataclass(frozen=True)
class SearchResults:
    """Results of a search."""

    # Best choice of each of the best families, and plain, fastest first. The order is the median of their ratios to
    # plain on the same workload.
    outcomes: tuple[SearchResult, ...]
    glances: dict[Choice, float]  # every choice simulated with one layer, and its seconds, median over its shapes
    refused: dict[Choice, str]  # choices that exceed the memory, each with its required and available memory
    fits: bool  # true if plain fits into memory. If it does not, it is the last of `outcomes`, as the baseline only.


def search(space: Space, judge: Evaluator, shapes: Sequence[Workload], workloads: Sequence[Workload]) -> SearchResults:
    """Find the fastest choices."""
    refused = dict[Choice, str]()

    def may(choice: Choice) -> bool:
        if choice not in refused and not fits_in_memory(judge, choice):
            refused[choice] = needs(judge, choice)
        return choice not in refused

    fits = may(Choice())
    explored: list[dict[Choice, float]] = []

    def is_near(choice: Choice) -> bool:
        return may(choice) and all(times.get(choice, 0.0) <= FAR * min(times.values()) for times in explored if times)

    for workload in shapes:
        # The best choices of one shape are among those of the others as a rule, so further shapes start from them.
        best = [choice for times in explored for choice in _best_of_families(times, FAMILIES)]
        explored.append(_explored(space, judge, workload, is_near, list(dict.fromkeys(best)) or space.first()))
    if not any(explored):
        raise ValueError(f"no choice fits into memory: plain {needs(judge, Choice())}")
    # A set has another order in every process, and hence another winner of ties.
    chosen = dict.fromkeys([*(one for times in explored for one in _best_of_families(times, FINALISTS)), Choice()])
    # Simulate all of them on every shape, so that a favorite of one shape is compared on the others.
    middle = {choice: float(np.median([judge.glance(choice, workload) for workload in shapes])) for choice in chosen}
    near = {choice: took for choice, took in middle.items() if took <= FAR * min(middle.values())}
    finalists = dict.fromkeys([*_best_of_families(near, FINALISTS), Choice()])
    outcomes = [judged(choice, judge, workloads) for choice in finalists]
    plain = next(one for one in outcomes if one.choice == Choice())
    # Compare per workload, because workloads differ; ties go to the simplest choice.
    outcomes.sort(key=lambda one: (one.choice in refused, float(np.median(one.ratios(plain))), one.choice.parts))
    if (with_room := _with_room(outcomes[0], space, judge, workloads)) is not None:
        outcomes.insert(0, with_room)
    seen = dict.fromkeys(itertools.chain.from_iterable(explored))
    glances = {choice: float(np.median([times[choice] for times in explored if choice in times])) for choice in seen}
    return SearchResults(tuple(outcomes), glances | middle, refused, fits)


def _with_room(
    best: SearchResult, space: Space, judge: Evaluator, workloads: Sequence[Workload]
) -> SearchResult | None:
    """Return the best choice with the next larger receive buffer if unseen workloads are likely to need it."""
    choice = best.choice
    if choice == Choice() or workloads[0].counts is None or not _may_overflow(choice, judge, workloads):
        return None
    larger = next(iter(choice.with_more_room), None)
    if larger is None or larger not in space or not fits_in_memory(judge, larger):
        return None
    found = judged(larger, judge, workloads)
    # By the rule of succession, after `n` workloads of one round the next one overflows with probability `1 / (n + 2)`.
    is_worth = _round_share(choice, judge, workloads) / (len(workloads) + 2)
    return found if float(np.median(found.ratios(best))) <= 1 + is_worth else None


def _may_overflow(choice: Choice, judge: Evaluator, workloads: Sequence[Workload]) -> bool:
    """Return whether a buffer is smaller than some load without balancing; other loads may then exceed it."""
    plain = replace(choice, system="plain", replica_slots=0, eps=None, relayed=False)
    return any(judge.rounds(plain, one) > 1 for one in workloads)


def _round_share(choice: Choice, judge: Evaluator, workloads: Sequence[Workload]) -> float:
    """Return the time of one more round over that of a layer, from the next smaller buffer."""
    if not choice.with_less_room:
        return ROUND_SHARE
    smaller = choice.with_less_room[-1]
    shares = [
        judge.glance(smaller, one) / judge.glance(choice, one) - 1
        for one in workloads
        if judge.rounds(smaller, one) > judge.rounds(choice, one)
    ]
    return float(np.mean(shares)) if shares else ROUND_SHARE


def judged(choice: Choice, judge: Evaluator, workloads: Iterable[Workload]) -> SearchResult:
    """Simulate whole steps of a choice on workloads."""
    reports = [judge.report(choice, workload) for workload in workloads]
    return SearchResult(choice, mean_report(reports), tuple(report.step_s for report in reports))


def _explored(
    space: Space, judge: Evaluator, workload: Workload, may: Callable[[Choice], bool], first: list[Choice]
) -> dict[Choice, float]:
    """Simulate one layer of the first choices and of the neighbors of the fastest ones."""
    times: dict[Choice, float] = {}

    def look(choices: Iterable[Choice]) -> None:
        new = [choice for choice in choices if choice not in times and may(choice)]
        bounds = {choice: judge.floor_s(choice, workload) for choice in new}
        # Those with the lowest bound come first, so that fewer of the others are simulated.
        for choice in sorted(bounds, key=bounds.__getitem__):
            best = [times[one] for one in _best_of_families(times, FAMILIES)]
            limit = best[-1] if len(best) == FAMILIES else float("inf")
            if bounds[choice] <= limit and judge.least_headroom(choice, workload) == choice:
                times[choice] = judge.glance(choice, workload)
                # A further round may take longer than all that balancing saves.
                if judge.rounds(choice, workload) > 1:
                    look(space.with_headroom(choice))

    look(first)
    for _ in range(MOST_MOVES):
        before = len(times)
        for choice in _best_of_families(times, FAMILIES):
            look(space.near(choice))
        if len(times) == before:
            break
    return times


def _best_of_families(times: dict[Choice, float], number: int) -> list[Choice]:
    """Return the fastest choice of each of the fastest families."""
    found: dict[Choice, Choice] = {}
    for choice in sorted(times, key=lambda choice: (times[choice], choice.parts)):
        found.setdefault(choice.family, choice)
    return list(found.values())[:number]
