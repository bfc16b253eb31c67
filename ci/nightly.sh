#!/usr/bin/env bash
# Run all tests on the newest nightly build of JAX, with extension modules built against its headers, in a separate
# environment. JAX_INDEX overrides the package index of jax and jaxlib.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-nightly
index=${JAX_INDEX:-https://us-python.pkg.dev/ml-oss-artifacts-published/jax/simple/}
make VENV="$venv" "$venv/.installed"
install() { "$venv/bin/uv" pip install -q --python "$venv/bin/python" "$@"; }
# The nightly index lacks the dependencies of jax.
install --upgrade --prerelease allow --index-strategy unsafe-best-match --extra-index-url "$index" jax jaxlib
# jaxlib accepts custom calls built with its own or older headers.
install --no-build-isolation --no-deps --reinstall -C build-dir=build/nightly -e .
"$venv/bin/jax-moe-lb" doctor
make VENV="$venv" test-all
"$venv/bin/python" ci/advice.py --all
# The CUDA module for drivers of CUDA 12.
bash ci/cuda12.sh "$venv"
# Mutants of C++, other ones every night. Without a CUDA toolkit, those of files with `_cuda` are left out.
PATH=$PWD/$venv/bin:$PATH "$venv/bin/python" ci/mutants.py --sample 20 --seed "$(date +%Y%m%d)" ||
  echo "mutants survived: see the list above"
