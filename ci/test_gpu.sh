#!/usr/bin/env bash
# Run the tests marked gpu and the copy engine benchmark, on a machine with a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
python -m pytest -n 0 -m gpu tests
python -m benchmarks.bench_copy_engine
