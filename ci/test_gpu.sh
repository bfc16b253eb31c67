#!/usr/bin/env bash
# Everything that needs a GPU: the tests marked so, and the benchmark of copy engines. Run it on a machine with one.
set -euo pipefail
cd "$(dirname "$0")/.."
python -m pytest -n 0 -m gpu tests
python -m benchmarks.bench_copy_engine
