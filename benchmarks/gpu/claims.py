"""Every claim about NVIDIA GPUs, with the check that proves it, in the order of worth."""

import re

from benchmarks.gpu import (
    ahead,
    build,
    clocks,
    comparison,
    compiled,
    counters,
    engines,
    gathers,
    layers,
    plans,
    processes,
    products,
    rank_kernels,
    step_cases,
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

BUILD = (
    Claim("loads", "The CUDA module loads with this jaxlib", CALLS, build.custom_calls_load),
    Claim("doctor", "`jax-moe-lb doctor` runs and finds the GPUs", GPU, build.doctor_reports),
    Claim("driver", "Nothing is off because of the driver", CALLS, build.driver_has_all),
    Claim("shareable", "Processes can map memory of XLA's default allocator", CALLS, build.memory_is_shareable),
    Claim("kernels-built", "The kernel of `exact` takes 64 ranks x 256 experts", CALLS, build.kernels_are_built),
    Claim("one-context", "Copies make no context on other GPUs", CALLS, build.one_context),
)

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
    *(
        Claim(
            f"one-kernel-{name}",
            f"A program with `{name}` plans in one kernel, without its host",
            CALLS,
            plans.planner_is_one_kernel(name),
        )
        for name in plans.IN_KERNELS
    ),
    Claim(
        "temporaries",
        f"The peak of a layer's memory is the compiled one, within {compiled.MEMORY_WITHIN:.0%}",
        "docs/compiling.md",
        compiled.temporaries("exact"),
    ),
    Claim(
        "timeline",
        f"The estimated time of a layer's operations is within a factor of {compiled.TIME_WITHIN}",
        "docs/results/timeline.md",
        compiled.timeline("exact"),
    ),
    Claim("host-waits", "A step of `exact` waits for its host at no point", GPU, compiled.no_host_waits("exact")),
)

KERNELS = (
    Claim(
        "rates",
        f"Kernels reach {products.WITHIN:.0%} of their recorded rates",
        "jax_moe_lb/core/devices/h100.toml",
        products.rates,
    ),
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

SHORT = {"Qwen3-30B-A3B": "qwen3", "DeepSeek-V3": "deepseek", "Mixtral-8x7B": "mixtral", "GPT-OSS-120B": "gpt-oss"}


PRODUCTS = tuple(
    Claim(
        f"fastest-{short}-{tiles.MODELS[model].rows}",
        f"The chosen kernels take at most {tiles.WITHIN} x the time of the fastest: {model}, "
        f"{tiles.MODELS[model].rows} rows",
        "jax_moe_lb/kernels/backends.py",
        tiles.fastest(model),
    )
    for model, short in SHORT.items()
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
    Claim(
        "gemm",
        f"Copy engines slow a GEMM by less than {engines.SLOWDOWN - 1:.0%}, and less than kernels do",
        "docs/custom_calls.md",
        engines.gemm_beside_copies,
    ),
    Claim(
        "planned-copy",
        "A plan with its copies beside a GEMM exposes less than both before it",
        CALLS,
        engines.planning_beside_gemm,
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

COMPARED = (
    ("qwen3", "Qwen3-30B-A3B"),
    ("mixtral", "Mixtral-8x7B"),
    ("deepseek", "DeepSeek-V3"),
    ("gpt-oss", "GPT-OSS-120B"),
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


COMPARISON = (
    *(claim for one in COMPARED for claim in _compared(*one)),
    Claim(
        "gathers",
        f"Gathers and sums of rows take at most {gathers.WITHIN} x the time of the fastest form",
        GPU,
        gathers.gathers_are_fast,
    ),
)

STEPS = (
    Claim(
        "constants",
        f"Memory and dense products reach the rates of the timeline within a factor of {steps.RATE_WITHIN}",
        "docs/compiling.md",
        steps.constants_hold,
    ),
    *(
        Claim(
            f"learns-{name}",
            f"A small model trains to the losses of float32 on a CPU: {case.model}",
            "docs/how-to/training.md",
            steps.losses_agree(name),
        )
        for name, case in step_cases.TINY.items()
    ),
    *(
        Claim(
            f"step-{name}",
            f"A step takes its estimated time within a factor of {steps.TIME_WITHIN} and the compiled memory, and "
            f"learns: {step_cases.CASES[name]}",
            "docs/results/timeline.md",
            steps.step_holds(name),
        )
        for name in step_cases.MEASURED
    ),
)

PARTS = {
    "kit": KIT,
    "build": BUILD,
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
