#!/usr/bin/env bash
# Run the programs that `jax-moe-lb advise` prints for presets, on virtual CPU devices; --all takes all pairs of presets.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/python ci/advice.py "$@"
