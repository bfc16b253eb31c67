"""Ahead-of-time compilation for absent accelerators, and reports on the compiled programs."""

from jax_moe_lb.aot.collectives import ProgramCollective
from jax_moe_lb.aot.compile import compile_for, quiet_stderr
from jax_moe_lb.aot.compiler_options import compiler_options
from jax_moe_lb.aot.layer import compile_layer
from jax_moe_lb.aot.load import LayerLoad, LayerSizes, counts_of
from jax_moe_lb.aot.memory import Buffer
from jax_moe_lb.aot.report import Operation, ProgramReport, print_report
from jax_moe_lb.aot.targets import Target, use_no_accelerators
from jax_moe_lb.aot.timeline import Span, Timeline
from jax_moe_lb.aot.timeline_report import print_timeline, write_timeline
from jax_moe_lb.aot.tune import Tuned, TunedForm, print_tuned, tune

__all__ = [
    "Buffer",
    "ProgramCollective",
    "compile_for",
    "compile_layer",
    "compiler_options",
    "counts_of",
    "LayerLoad",
    "LayerSizes",
    "Operation",
    "print_report",
    "print_timeline",
    "print_tuned",
    "quiet_stderr",
    "ProgramReport",
    "Span",
    "Target",
    "Timeline",
    "tune",
    "Tuned",
    "TunedForm",
    "use_no_accelerators",
    "write_timeline",
]


def __dir__() -> list[str]:
    return __all__
