#!/usr/bin/env bash
# Train as a user does, with fewer steps; then resume the run and replay its trace.
set -euo pipefail
cd "$(dirname "$0")/.."
run_dir=$(mktemp -d)
trap 'rm -rf "$run_dir"' EXIT
make train ARGS="--steps 12 --run-dir $run_dir"
make train ARGS="--steps 16 --run-dir $run_dir --resume"
.venv/bin/jax-moe-lb replay "$run_dir/counts.npz" --balancer exact --json > "$run_dir/replay.json"
test -s "$run_dir/report.html"
.venv/bin/jax-moe-lb doctor
