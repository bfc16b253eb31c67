"""Every claim about NVIDIA GPUs, with the check that proves it, in the order of worth."""

import re
from collections.abc import Iterable
from functools import partial

from benchmarks.gpu import (
    ahead,
    clocks,
    comparison,
    compiled,
    counters,
    engines,
    layers,
    plans,
    processes,
    products,
    rank_kernels,
    steps,
    tiles,
    times,
    training,
)
from benchmarks.gpu.findings import Check, Claim
from jax_moe_lb.kernels.backends import BACKENDS, Backend
from jax_moe_lb.layer.systems import system_names

CALLS, GPU, LAYER, STEPS = "docs/custom_calls.md", "docs/how-to/gpu.md", "docs/pipeline.md", "docs/results/timeline.md"
MODELS = {"qwen3": "Qwen3-30B-A3B", "mixtral": "Mixtral-8x7B", "deepseek": "DeepSeek-V3", "gpt-oss": "GPT-OSS-120B"}


def _claims(source: str, *rows: tuple[str, str, Check]) -> tuple[Claim, ...]:
    return tuple(Claim(name, text, source, check) for name, text, check in rows)


def _layers(start: str, where: str, devices: int | None) -> Iterable[tuple[str, str, Check]]:
    for name in system_names():
        text = f"Outputs and gradients of `{name}` {where} equal those of a dense layer"
        yield f"{start}-{name}", text, partial(layers.layer_equals_dense, name, devices)


def _products() -> Iterable[tuple[str, str, Check]]:
    for backend in (one for one in BACKENDS if one.platform in ("cuda", None)):
        text = f"Products of the backend {backend.name} equal those by blocks of rows, in repeated calls bitwise"
        yield claim_of_products(backend), text, partial(products.values_equal, backend.name)


def claim_of_products(backend: Backend) -> str:
    """Return the name of the claim about the values of a backend's products."""
    return f"products-{re.split(r'[^a-z]', backend.name.lower())[0]}"


def _ranks() -> Iterable[tuple[str, str, Check]]:
    # Both checks of a model share the compiled programs.
    for name, model in MODELS.items():
        yield f"rank-{name}", f"{FASTER_RANK}: {model}", partial(comparison.balanced_is_faster, name)
        yield f"rank-kernels-{name}", f"{MOST_OF_RANK}: {model}", partial(rank_kernels.products_take_most, name)


def _fastest() -> Iterable[tuple[str, str, Check]]:
    for short, model in MODELS.items():
        rows = tiles.MODELS[model].rows
        text = f"The chosen kernels take at most {tiles.WITHIN} x the time of the fastest: {model}, {rows} rows"
        yield f"fastest-{short}-{rows}", text, partial(tiles.fastest, model)


FASTER_RANK = (
    "At 4 x mean load, the slowest rank of `exact` takes less than half the time of `plain`, and less memory than a "
    "worst-case buffer"
)
MOST_OF_RANK = "At 4 x mean load, products take most of the time of a rank of `exact` with one round"
EQUAL = "equal those of C++ on the host"
PLANS = [
    (f"plans-{name}", f"Plans of `{name}` {EQUAL}", partial(plans.plans_equal_host, name)) for name in plans.PLANNERS
]
FAILED = "A failed plan is -1 throughout, and the next one is correct"
STORED = "Programs compiled for an absent GPU load and have equal results"
RATES = "Copies, gathers and dense products have rates on random data"
BAD_LOAD = "A negative quota stops a planned copy with a message"
RELAYS = "Copies along relays are exact, and gradients are summed at home"
PEAK = f"The peak of a layer's memory is the compiled one, within {compiled.MEMORY_WITHIN:.0%}"
TIMELINE = f"The estimated time of a layer's operations is within a factor of {compiled.TIME_WITHIN}"
FASTER = "A program with the kernel of `exact` is faster than one with a planner on the host"
NSIGHT = "Nsight Compute reads the counters of grouped products: Qwen3-30B-A3B"
STEP = f"A step takes its estimated time within a factor of {steps.TIME_WITHIN} and the compiled memory, and learns"
COPIES = "processes on one GPU copy from each other's memory"
ENDED = "A killed process ends the copies of the others, which name it"
GEMM = f"Copy engines slow a GEMM by less than {engines.SLOWDOWN - 1:.0%}, and less than kernels do"
EXPOSED = "A plan with its copies beside a GEMM exposes less than both before it"

PARTS = {
    "kit": _claims(GPU, ("stored-programs", STORED, ahead.stored_programs_load)),
    "device": _claims(GPU, ("clocks", RATES, clocks.rates)),
    "values": (
        *_claims(CALLS, *PLANS, ("failed-plan", FAILED, plans.failed_plan_is_marked)),
        *_claims(LAYER, *_layers("layer", "on one GPU", 1)),
        *_claims(
            CALLS,
            ("copy-values", "Copies beside a product are exact", engines.copies_are_exact),
            ("relays", RELAYS, engines.relays_and_gradients),
            ("bad-load", BAD_LOAD, engines.bad_load_stops_the_program),
        ),
        *_claims(GPU, *_products()),
        *_claims(LAYER, *_layers("group", "across all GPUs", None)),
    ),
    "compiled": (
        *_claims("docs/compiling.md", ("temporaries", PEAK, compiled.temporaries)),
        *_claims(STEPS, ("timeline", TIMELINE, compiled.timeline)),
    ),
    "kernels": (
        *_claims(
            "docs/results/exact.md",
            ("planner-time", "The kernel of `exact` takes at most its estimate", times.exact_kernel),
        ),
        *_claims(CALLS, ("planner-faster", FASTER, times.kernel_is_faster_than_host)),
    ),
    "comparison": _claims(GPU, *_ranks()),
    "products": _claims("jax_moe_lb/kernels/backends.py", *_fastest()),
    "counters": _claims(GPU, ("counters-qwen3", NSIGHT, partial(counters.counters, "Qwen3-30B-A3B"))),
    "steps": _claims(
        STEPS,
        *((f"step-{name}", f"{STEP}: {case}", partial(steps.step_holds, name)) for name, case in steps.CASES.items()),
    ),
    "copies": _claims(
        CALLS,
        ("processes-2", f"2 {COPIES}", partial(processes.copies_between, 2)),
        ("processes-4", f"4 {COPIES}", partial(processes.copies_between, 4)),
        ("ended-process", ENDED, processes.ended_process_is_named),
        ("gemm", GEMM, engines.gemm_beside_copies),
        ("planned-copy", EXPOSED, engines.planning_beside_gemm),
    ),
    "training": _claims(
        "docs/how-to/training.md",
        ("trains-exact", "`tiny` trains with `exact` to the loss of `plain`", training.trains),
    ),
}
"""Claims of each part, the most valuable part first."""
