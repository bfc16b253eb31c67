#!/usr/bin/env bash
# Run the checks of claims about GPUs with tiny sizes on CPUs, so that they do not fail for their own faults on a GPU: in
# the order and processes of a machine with little time, with stored programs, and with results written afterwards.
set -euo pipefail
cd "$(dirname "$0")/.."
# Compilation dominates; without optimizations it takes a third less time.
export XLA_FLAGS="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
.venv/bin/python -m benchmarks.gpu.session --dry-run
