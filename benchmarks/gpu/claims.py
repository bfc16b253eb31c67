"""Every claim about NVIDIA GPUs, with the check that proves it, in the order of worth."""

import re

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
from benchmarks.gpu.findings import Claim
from jax_moe_lb.kernels.backends import BACKENDS
from jax_moe_lb.layer.systems import system_names

CALLS, GPU = "docs/custom_calls.md", "docs/how-to/gpu.md"

KIT = (
    Claim(
        "stored-programs",
        "Programs compiled for an absent GPU load and have equal results",
        GPU,
        ahead.stored_programs_load,
    ),
)

DEVICE = (Claim("clocks", "Copies, gathers and dense products have rates on random data", GPU, clocks.rates),)

VALUES = (
    *(
        Claim(
            f"plans-{name}",
            f"Plans of `{name}` equal those of C++ on the host",
            CALLS,
            plans.plans_equal_host(name),
        )
        for name in plans.PLANNERS
    ),
    Claim(
        "failed-plan", "A failed plan is -1 throughout, and the next one is correct", CALLS, plans.failed_plan_is_marked
    ),
    *(
        Claim(
            f"layer-{name}",
            f"Outputs and gradients of `{name}` on one GPU equal those of a dense layer",
            "docs/pipeline.md",
            layers.layer_equals_dense(name, 1),
        )
        for name in system_names()
    ),
    Claim("copy-values", "Copies beside a product are exact", CALLS, engines.copies_are_exact),
    Claim(
        "relays", "Copies along relays are exact, and gradients are summed at home", CALLS, engines.relays_and_gradients
    ),
    Claim(
        "bad-load", "A negative quota stops a planned copy with a message", CALLS, engines.bad_load_stops_the_program
    ),
    *(
        Claim(
            f"products-{re.split(r'[^a-z]', backend.name.lower())[0]}",
            f"Products of the backend {backend.name} equal those by blocks of rows, in repeated calls bitwise",
            GPU,
            products.values_equal(backend.name),
        )
        for backend in BACKENDS
        if backend.platform in ("cuda", None)
    ),
    *(
        Claim(
            f"group-{name}",
            f"Outputs and gradients of `{name}` across all GPUs equal those of a dense layer",
            "docs/pipeline.md",
            layers.layer_equals_dense(name, None),
        )
        for name in system_names()
    ),
)

COMPILED = (
    Claim(
        "temporaries",
        f"The peak of a layer's memory is the compiled one, within {compiled.MEMORY_WITHIN:.0%}",
        "docs/compiling.md",
        compiled.temporaries,
    ),
    Claim(
        "timeline",
        f"The estimated time of a layer's operations is within a factor of {compiled.TIME_WITHIN}",
        "docs/results/timeline.md",
        compiled.timeline,
    ),
)

KERNELS = (
    Claim(
        "planner-time", "The kernel of `exact` takes at most its estimate", "docs/results/exact.md", times.exact_kernel
    ),
    Claim(
        "planner-faster",
        "A program with the kernel of `exact` is faster than one with a planner on the host",
        CALLS,
        times.kernel_is_faster_than_host,
    ),
)

MODELS = {"qwen3": "Qwen3-30B-A3B", "mixtral": "Mixtral-8x7B", "deepseek": "DeepSeek-V3", "gpt-oss": "GPT-OSS-120B"}

PRODUCTS = tuple(
    Claim(
        f"fastest-{short}-{tiles.MODELS[model].rows}",
        f"The chosen kernels take at most {tiles.WITHIN} x the time of the fastest: {model}, "
        f"{tiles.MODELS[model].rows} rows",
        "jax_moe_lb/kernels/backends.py",
        tiles.fastest(model),
    )
    for short, model in MODELS.items()
)

COUNTERS = (
    Claim(
        "counters-qwen3",
        "Nsight Compute reads the counters of grouped products: Qwen3-30B-A3B",
        GPU,
        counters.counters("Qwen3-30B-A3B"),
    ),
)

COPIES = (
    *(
        Claim(
            f"processes-{number}",
            f"{number} processes on one GPU copy from each other's memory",
            CALLS,
            processes.copies_between(number),
        )
        for number in (2, 4)
    ),
    Claim(
        "ended-process",
        "A killed process ends the copies of the others, which name it",
        CALLS,
        processes.ended_process_is_named,
    ),
)

TRAINING = (
    Claim(
        "trains-exact",
        "`tiny` trains with `exact` to the loss of `plain`",
        "docs/how-to/training.md",
        training.trains("exact"),
    ),
)


def _compared(name: str, model: str) -> tuple[Claim, Claim]:
    # Both checks share the compiled programs.
    return (
        Claim(
            f"rank-{name}",
            f"At 4 x mean load, the slowest rank of `exact` takes less than half the time of `plain`, and less memory "
            f"than a worst-case buffer: {model}",
            GPU,
            comparison.balanced_is_faster(name),
        ),
        Claim(
            f"rank-kernels-{name}",
            f"At 4 x mean load, products take most of the time of a rank of `exact` with one round: {model}",
            GPU,
            rank_kernels.products_take_most(name),
        ),
    )


COMPARISON = tuple(claim for one in MODELS.items() for claim in _compared(*one))

STEPS = tuple(
    Claim(
        f"step-{name}",
        f"A step takes its estimated time within a factor of {steps.TIME_WITHIN} and the compiled memory, and "
        f"learns: {case}",
        "docs/results/timeline.md",
        steps.step_holds(name),
    )
    for name, case in steps.CASES.items()
)

PARTS = {
    "kit": KIT,
    "device": DEVICE,
    "values": VALUES,
    "compiled": COMPILED,
    "kernels": KERNELS,
    "comparison": COMPARISON,
    "products": PRODUCTS,
    "counters": COUNTERS,
    "steps": STEPS,
    "copies": COPIES,
    "training": TRAINING,
}
"""Claims of each part, the most valuable part first."""
