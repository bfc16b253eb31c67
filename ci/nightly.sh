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
# Mutants of C++, other ones every night: those of kernels and exchanges need no CUDA toolkit.
cmake -S . -B build/mutants -G Ninja -DCMAKE_CXX_FLAGS="-O1 -DNDEBUG" -DPython_EXECUTABLE="$PWD/$venv/bin/python" \
  -Dnanobind_DIR="$("$venv/bin/python" -m nanobind --cmake_dir)" -Dpybind11_DIR="$("$venv/bin/python" -m pybind11 --cmakedir)"
"$venv/bin/python" ci/mutants.py build/mutants --sample 20 --seed "$(date +%Y%m%d)" --out build/mutants_nightly.json \
  --files 'ffi/planning/device/*.h' 'ffi/transport/exchange*.cc' 'ffi/transport/rendezvous.*' ||
  echo "mutants survived: see the list above"
