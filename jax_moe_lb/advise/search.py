"""Search for the fastest choices of a `Space`.

The search has three stages. On one workload of every shape it simulates one layer of the first choices of the space,
then repeatedly all neighbors of the fastest families, until no neighbor is faster. It simulates one layer of the
fastest ones on every shape. The best of these get whole steps on all workloads. A choice with a lower bound above the
time of others is not simulated. The first two stages are a heuristic: a choice that is slow on the first workloads is
not tried on the others.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jax_moe_lb.advise.choice import Choice
from jax_moe_lb.advise.evaluate import Evaluator, Workload
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.run import Report, mean_report

SLOTS = (1, 2, 4, 8)
"""These numbers of replica slots are tried, as far as `E - L` allows."""

EPS = (None, 0.05)
"""These `eps` of `Exact` are tried: its own, 0.01, and a larger one."""

HEADROOMS = (None, 1.25, 2.0)
"""These receive buffers over the mean load are tried: a system's own, 1.05, and what saves rounds of uneven loads."""

BALANCED = ("greedy", "exact", "ultraep")
"""These systems plan quotas; they are tried in all compositions."""

PUBLISHED = ("eplb_plus", "fastermoe", "feplb")
"""These systems are tried alone."""

HISTORICAL = ("eplb", "lplb")
"""These are tried alone, too, where it is known what was before: they plan from it."""


@dataclass(frozen=True)
class Space:
    """A space has all choices that may help on a machine.

    Args:
        cluster: the machine.
        most_slots: the most replica slots of a rank, at most `E - L`; 0 for no replicas.
        planned: whether systems that plan are in it; else there are plain and expert domains, as where nobody knows the
            counts.
        with_exact: whether `exact` is in it: without the planning module a trial is a program to compile, too slow.
        with_relocation: whether workloads know what was before them.
        ratio: the compression of gathered experts, 1 for none.
        sampled: whether the machine is a sample of a larger one. Then expert domains leave several groups in it.
        with_history: whether workloads have steps before them, from which some systems plan.

    Examples:
        >>> from jax_moe_lb.sim import Cluster, Links
        >>> space = Space(Cluster((Links("node", 2, 50e9), Links("gpu", 2, 360e9))), most_slots=2)
        >>> space.domain_sizes()
        [(1, 2), (2, 1), (2, 2)]
        >>> len(set(space.every())), Choice("exact", 1, sprayed=True) in space
        (231, False)
    """

    cluster: Cluster
    most_slots: int
    planned: bool = True
    with_exact: bool = True
    with_relocation: bool = True
    ratio: float = 1.0
    sampled: bool = False
    with_history: bool = False

    @property
    def slots(self) -> tuple[int, ...]:
        """Returns the numbers of replica slots."""
        return tuple(slots for slots in SLOTS if slots <= self.most_slots)

    @property
    def alone(self) -> tuple[str, ...]:
        """Returns the systems that are tried in no composition."""
        return (*PUBLISHED, *HISTORICAL) if self.with_history else PUBLISHED

    @property
    def has_rails(self) -> bool:
        """Tells whether tokens could take other rails than their own: only between nodes with several."""
        topology = self.cluster.topology()
        return topology.num_ranks > topology.ranks_per_node and topology.rails_per_node > 1

    def domain_sizes(self) -> list[tuple[int, ...]]:
        """Lists the sizes of expert domains, all divisors of every level, but those in which nothing is gathered."""
        divisors = [[n for n in range(1, level.size + 1) if level.size % n == 0] for level in self.cluster.levels]
        if self.sampled:
            # All of the sample in one domain would leave nobody to exchange tokens with.
            divisors[0].pop()
        return [sizes for sizes in itertools.product(*divisors) if max(sizes) > 1]

    def first(self) -> list[Choice]:
        """Lists where a search begins: every system alone, and plain and one other in every size of expert domains."""
        slots = min(2, self.most_slots) if self.planned else 0
        systems = [Choice(name, slots) for name in (*BALANCED, *self.alone)] if slots else []
        best = Choice("exact" if self.with_exact else "greedy", slots)
        inside = [Choice(), best] if slots else [Choice()]
        gathered = [replace(one, domain_sizes=s, ratio=self.ratio) for s in self.domain_sizes() for one in inside]
        others = [replace(one, sprayed=True) for one in inside] + [replace(one, relocated=True) for one in inside]
        found = [Choice(), *systems, *others, *gathered]
        return [choice for choice in found if choice in self]

    def every(self) -> Iterator[Choice]:
        """Yields all choices; there are hundreds, of which a search tries some."""
        flags = (False, True)
        for name, sizes in itertools.product(("plain", *BALANCED, *self.alone), [(), *self.domain_sizes()]):
            ratio = self.ratio if sizes else 1.0
            for slots, eps, room in itertools.product(self.slots if name != "plain" else (0,), EPS, HEADROOMS):
                for relayed, sprayed, relocated in itertools.product(flags, flags, flags):
                    choice = Choice(name, slots, eps, relayed, sprayed, relocated, sizes, ratio, room)
                    if choice in self:
                        yield choice

    def near(self, choice: Choice) -> list[Choice]:
        """Lists what differs from a choice in one part, or in one level's size of expert domains.

        Args:
            choice: the one to begin at.
        """
        slots = choice.replica_slots or min(2, self.most_slots)
        found = [replace(choice, system=name, replica_slots=slots, eps=None, relayed=False) for name in BALANCED]
        found.append(replace(choice, system="plain", replica_slots=0, eps=None, relayed=False))
        found += [replace(choice, replica_slots=slots) for slots in self.slots if choice.replica_slots]
        found += [replace(choice, eps=eps) for eps in EPS]
        found += [replace(choice, headroom=headroom) for headroom in HEADROOMS]
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
        """Tells whether a choice may help here, and whether the library can run it."""
        if choice.system == "plain":
            fits = not choice.replica_slots and not choice.relayed
        else:
            fits = choice.replica_slots in self.slots
        fits &= choice.system in ("plain", *BALANCED, *self.alone)
        is_exact = choice.system == "exact"
        fits &= self.with_exact or not is_exact
        fits &= choice.eps is None or is_exact
        # UltraEP has relays of its own, and those of the papers stay as they are.
        fits &= not choice.relayed or choice.system in ("greedy", "exact")
        composed = choice.sprayed or choice.relocated or bool(choice.domain_sizes)
        fits &= not composed or choice.system in ("plain", *BALANCED)
        fits &= self.planned or (choice.system == "plain" and not choice.sprayed)
        # Uniform routing fills no buffer twice.
        fits &= choice.headroom is None or (self.planned and choice.system in ("plain", *BALANCED))
        fits &= not choice.sprayed or self.has_rails
        # Relocation beside expert domains has no test in the library, so nobody is told to use it.
        fits &= not choice.relocated or (self.with_relocation and not choice.domain_sizes)
        return bool(fits)


FAMILIES = 4
"""The search goes on from the best of so many families; a family differs in slots, eps and relays alone."""

MOST_MOVES = 8
"""It goes on so often at most; three or four times are usual."""

FINALISTS = 8
"""So many families get whole steps on all workloads."""


@dataclass(frozen=True)
class SearchResult:
    """An outcome is a choice with what its whole steps took.

    Args:
        choice: what was simulated.
        report: the mean over all workloads.
        times_s: the seconds of a step on each workload, in the order of the workloads.
    """

    choice: Choice
    report: Report
    times_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Returns the median over workloads."""
        return float(np.median(self.times_s))

    def ratios(self, other: "SearchResult") -> tuple[float, ...]:
        """Returns its time over another's, workload by workload.

        Args:
            other: an outcome on the same workloads.
        """
        # Where neither takes any time they are equal.
        return tuple(mine / its if its else 1.0 for mine, its in zip(self.times_s, other.times_s, strict=True))

    def is_like(self, other: "SearchResult") -> bool:
        """Tells whether the range of the ratios includes 1: on some workload each is as fast as the other."""
        ratios = self.ratios(other)
        return min(ratios) <= 1 <= max(ratios)


@dataclass(frozen=True)
class SearchResults:
    """This is what a search has found.

    Args:
        outcomes: the best of each of the best families, and plain, by the median of their time over plain's on the
            same workload, the fastest first.
        glances: every choice that was looked at, with the seconds of one layer, the median over the shapes on which it
            was.
        refused: choices that need more memory than there is, each with what it needs.
        fits: whether plain fits into memory; if not, nothing is refused for it.
    """

    outcomes: tuple[SearchResult, ...]
    glances: dict[Choice, float]
    refused: dict[Choice, str]
    fits: bool


def search(space: Space, judge: Evaluator, shapes: Sequence[Workload], workloads: Sequence[Workload]) -> SearchResults:
    """Finds the fastest choices.

    Args:
        space: the choices.
        judge: it simulates them.
        shapes: the workloads of the first two stages, one of each shape.
        workloads: those of whole steps.
    """
    fits, refused = fits_in_memory(judge, Choice()), dict[Choice, str]()

    def may(choice: Choice) -> bool:
        if fits and not fits_in_memory(judge, choice):
            refused[choice] = needs(judge, choice)
        return choice not in refused

    explored = [_explored(space, judge, workload, may) for workload in shapes]
    chosen = {choice for times in explored for choice in _best_of_families(times, FINALISTS)} | {Choice()}
    # On every shape, so that what one of them favours is compared on the others.
    middle = {choice: float(np.median([judge.glance(choice, workload) for workload in shapes])) for choice in chosen}
    finalists = dict.fromkeys([*_best_of_families(middle, FINALISTS), Choice()])
    outcomes = [judged(choice, judge, workloads) for choice in finalists]
    plain = next(one for one in outcomes if one.choice == Choice())
    # Workload by workload, as workloads differ; of equals the simplest.
    outcomes.sort(key=lambda one: (float(np.median(one.ratios(plain))), one.choice.parts))
    glances = {c: float(np.median([t[c] for t in explored if c in t])) for c in dict.fromkeys(_all(explored))} | middle
    return SearchResults(tuple(outcomes), glances, refused, fits)


def judged(choice: Choice, judge: Evaluator, workloads: Iterable[Workload]) -> SearchResult:
    """Simulates whole steps of a choice on workloads.

    Args:
        choice: what to simulate.
        judge: it simulates.
        workloads: at least one.
    """
    reports = [judge.report(choice, workload) for workload in workloads]
    return SearchResult(choice, mean_report(reports), tuple(report.step_s for report in reports))


def fits_in_memory(judge: Evaluator, choice: Choice) -> bool:
    """Tells whether a choice fits into a rank's memory; it does where nobody knows how much there is."""
    there = judge.cluster.memory_bytes
    return there is None or judge.memory(choice).total <= there


def needs(judge: Evaluator, choice: Choice) -> str:
    """Says what a choice needs of how much memory, by name."""
    memory, there = judge.memory(choice), judge.cluster.memory_bytes or 0.0
    return f"needs {memory.total / 1e9:.1f} GB of {there / 1e9:.1f}: {memory.words}"


def _explored(space: Space, judge: Evaluator, workload: Workload, may: Callable[[Choice], bool]) -> dict[Choice, float]:
    """Looks at one layer of choices, those beside the fastest included."""
    times: dict[Choice, float] = {}

    def look(choices: Iterable[Choice]) -> None:
        for choice in choices:
            best = [times[one] for one in _best_of_families(times, FAMILIES)]
            limit = best[-1] if len(best) == FAMILIES else float("inf")
            if choice not in times and may(choice) and judge.floor_s(choice) <= limit:
                times[choice] = judge.glance(choice, workload)

    look(space.first())
    for _ in range(MOST_MOVES):
        before = len(times)
        for choice in _best_of_families(times, FAMILIES):
            look(space.near(choice))
        if len(times) == before:
            break
    return times


def _best_of_families(times: dict[Choice, float], number: int) -> list[Choice]:
    """Returns the fastest choice of each of the fastest families."""
    found: dict[Choice, Choice] = {}
    for choice in sorted(times, key=lambda choice: (times[choice], choice.parts)):
        found.setdefault(choice.family, choice)
    return list(found.values())[:number]


def _all(explored: Sequence[dict[Choice, float]]) -> Iterable[Choice]:
    return (choice for times in explored for choice in times)
