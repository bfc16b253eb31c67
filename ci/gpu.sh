#!/usr/bin/env bash
# Run the checks of claims about GPUs with tiny sizes on CPUs, so that they do not fail for their own faults on a GPU: in
# the order and processes of a machine with little time, with stored programs, and with results written afterwards.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/python -m benchmarks.gpu.session --dry-run
