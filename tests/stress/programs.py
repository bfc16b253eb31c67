"""Programs of the random layer test: combinations of system, router, mesh, dtype and transformation."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tests.stress.float64_router import Rules
from tests.stress.layouts import LAYOUTS, NODES, RAILS, SPLIT

SEED = 20250101
INPUTS = 18
"""Inputs per program: compiling one takes seconds, running one a few hundredths of a second."""

SYSTEMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("plain", "greedy", "ultraep", "exact", "two_tier", "hybridep", "feplb"), tuple(LAYOUTS)),
    **dict.fromkeys(("fastermoe", "eplb", "eplb_plus", "lplb"), tuple(LAYOUTS)),
    "rails": RAILS,
    "eplb_plus in two phases, along relays": tuple(LAYOUTS),
    "any plan in two phases": tuple(LAYOUTS),
    "any plan, along relays": tuple(LAYOUTS),
    "any plan, sprayed": RAILS,
    "any plan, once, along relays": tuple(LAYOUTS),
    "any plan, forwarded": NODES,
    "experts gathered, exact": SPLIT,
    "experts gathered, exact, once": SPLIT,
    "experts gathered, exact, sprayed": ("2 centres of 2 nodes of 2",),
}
"""Layouts supported by each system."""

REMEMBERS = ("eplb", "lplb")
"""Systems with a state."""

TWO_PHASES = ("feplb", "eplb_plus in two phases, along relays", "any plan in two phases")
LISTS = ("any plan, once, along relays", "any plan, forwarded", "experts gathered, exact, once")
SPRAYS = ("rails", "any plan, sprayed", "experts gathered, exact, sprayed")
ON_HOST = ("lplb", *(name for name in SYSTEMS if name.startswith("any plan")))
"""Systems with a planner on the host, which `jax.export` cannot serialize."""

ROUTERS = {
    "softmax": Rules(2),
    "softmax, one": Rules(1),
    "softmax, one, score as weight": Rules(1, renormalise=False),
    "softmax, three, scores as weights, scaled": Rules(3, renormalise=False, scale=1.5),
    "softmax, groups by their best": Rules(2, renormalise=False, scale=4.0, groups=(2, 1, 1)),
    "softmax, bias": Rules(3),
    "sigmoid, bias, groups by their best two": Rules(2, "sigmoid", scale=2.5, groups=(2, 1, 2)),
    "sigmoid, bias, scores as weights": Rules(2, "sigmoid", renormalise=False),
    "all experts": Rules(0),
    "forced": Rules(2, forced=True),
    "forced, sigmoid, scores as weights": Rules(3, "sigmoid", renormalise=False, forced=True),
}
"""0 experts per token means all experts."""

LOSSES = {
    "none": {},
    "switch": {"switch": 0.7},
    "sequence": {"sequence": 0.5},
    "z": {"z": 0.02},
    "all": {"switch": 0.3, "sequence": 0.4, "z": 0.01},
}
DTYPES = ("float64", "float32", "bfloat16")
TRANSFORMATIONS = (
    "not jitted",
    "jit",
    "jit, donated",
    "checkpoint",
    "checkpoint, names kept",
    "checkpoint, products kept",
    "checkpoint, received arrays kept",
    "checkpoint, everything kept",
    "scan over layers",
    "scan over layers with weights of their own, checkpoint, names kept",
    "microbatches",
    "module",
    "module, checkpoint",
    "exported",
    "two meshes",
    "nested",
)
TRANSFERS = ("none", "float8", "int8")
SAVED = ("nothing", "replicas", "rows", "hidden", "replicas, rows and hidden")
ROUNDS = ((0.3, None), (0.7, None), (1.05, None), (4.0, 2), (8.0, 1))
"""Headrooms with sufficient limits of rounds, if all tokens go to one of eight ranks."""


@dataclass(frozen=True)
class Program:
    """Program compiled once and run on many inputs."""

    number: int
    system: str
    layout: str
    explicit: bool
    dtype: str
    router: str
    losses: str
    transformation: str
    gated: bool
    masked: bool
    homes: bool
    num_home: int
    num_tokens: int  # per shard
    features: int
    mlp_dim: int
    headroom: float
    max_rounds: int | None
    check_vma: bool
    transfer: str
    block: int  # numbers per scale of a transfer
    saved: str
    chunks: int

    @property
    def num_experts(self) -> int:
        return self.num_home * LAYOUTS[self.layout].num_ranks

    @property
    def width(self) -> int:
        """Number of columns: the features, then a preference for each expert."""
        return self.features + self.num_experts

    @property
    def has_bias(self) -> bool:
        """Whether a bias is passed; a forced choice must ignore it."""
        return "bias" in self.router or ROUTERS[self.router].forced

    @property
    def quantizes_outputs(self) -> bool:
        """Whether a transfer rounds outputs, too; sums of outputs return in the dtype of the tokens."""
        return self.transfer != "none" and self.system not in LISTS

    @property
    def gathers(self) -> bool:
        return self.system.startswith("experts gathered")

    @property
    def num_groups(self) -> int:
        """Number of groups exchanging tokens: a gathering layer has one for each offset."""
        layout = LAYOUTS[self.layout]
        return layout.shards // layout.num_ranks * (layout.domain_size if self.gathers else 1)

    @property
    def num_ranks(self) -> int:
        return LAYOUTS[self.layout].shards // self.num_groups

    @property
    def scans(self) -> bool:
        return self.transformation.startswith("scan")

    @property
    def layers(self) -> int:
        return 2 if self.scans else 1

    @property
    def own_weights(self) -> bool:
        return "weights of their own" in self.transformation

    @property
    def microbatches(self) -> int:
        return 2 if self.transformation == "microbatches" else 1

    @property
    def sequence_length(self) -> int:
        """Two sequences per shard, or one of an odd length."""
        return self.num_tokens if self.num_tokens % 2 else self.num_tokens // 2

    def rules(self) -> Rules:
        rules, losses = ROUTERS[self.router], LOSSES[self.losses]
        per_tok = rules.per_tok or self.num_experts
        options = {**vars(rules), **losses, "per_tok": per_tok, "sequence_length": self.sequence_length}
        return Rules(**options)


def _is_possible(system: str, layout: str, transformation: str) -> bool:
    if transformation == "nested":
        return "data" in LAYOUTS[layout].names and not system.startswith("experts gathered")
    return transformation != "exported" or system not in ON_HOST


def draw_programs(count: int) -> list[Program]:
    """Return programs in which every compatible value of every option occurs about equally often."""
    rng, used = np.random.default_rng(SEED), Counter()

    def pick(choice: str, values: Iterable) -> Any:
        # Pick the least used compatible value, with random ties, so that few programs cover all values.
        options = list(values)
        rng.shuffle(options)
        value = min(options, key=lambda option: used[choice, option])
        used[choice, value] += 1
        return value

    def draw(number: int) -> Program:
        system = pick("system", SYSTEMS)
        layout = pick("layout", SYSTEMS[system])
        num_ranks = LAYOUTS[layout].num_ranks
        # Expert groups are two halves with at least two experts each.
        num_home = [home for home in range(1, 9) if 4 <= home * num_ranks <= 24 and home * num_ranks % 2 == 0]
        num_home = int(rng.choice(num_home))
        headroom, max_rounds = pick("rounds", ROUNDS)
        transformation = pick("transformation", filter(partial(_is_possible, system, layout), TRANSFORMATIONS))
        nested = transformation == "nested"
        # Rounded outputs could change the experts of the next layer.
        quantizes = system not in TWO_PHASES and not transformation.startswith("scan")
        transfer = pick("transfer", TRANSFERS) if quantizes else "none"
        features = int(rng.choice([2, 3, 4, 5, 6, 29]))
        if transfer != "none":
            # The width must be a multiple of the block.
            features += -(features + num_home * num_ranks) % 4
        chunks = pick("chunks", (1, 2)) if system not in TWO_PHASES + LISTS + SPRAYS else 1
        saved = [] if system in TWO_PHASES + LISTS else [name for name in SAVED if chunks == 1 or "rows" not in name]
        return Program(
            number,
            system,
            layout,
            explicit=not nested and pick("explicit", (False, True)),
            dtype=pick("dtype", DTYPES),
            router=pick("router", ROUTERS),
            losses=pick("losses", LOSSES),
            transformation=transformation,
            gated=pick("gated", (False, True)),
            masked=pick("masked", (False, True)),
            homes=system not in REMEMBERS and pick("homes", (False, True)),
            num_home=num_home,
            num_tokens=int(rng.choice([1, 2, 4, 5, 6, 7, 11, 12, 13, 16, 17])),
            features=features,
            mlp_dim=int(rng.choice([1, 3, 8, 16, 33])),
            headroom=headroom,
            max_rounds=max_rounds,
            # With check_vma, JAX 0.12 cannot lower the gradient of nested `shard_map`s.
            check_vma=not nested and pick("check_vma", (True, False)),
            transfer=transfer,
            block=int(rng.choice([4, features + num_home * num_ranks])),
            saved=pick("saved", saved) if saved else "nothing",
            chunks=chunks,
        )

    return [draw(number) for number in range(count)]
