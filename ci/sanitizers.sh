#!/usr/bin/env bash
# Run the C++ tests, random custom calls, and the CUDA handlers on a test double of the CUDA runtime, under sanitizers.
# `sanitizers.sh --nightly` runs other random calls every day, and more of them.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Require the CUDA handlers if a toolkit is installed; without one they cannot be compiled.
cuda=OFF
if command -v nvcc > /dev/null || [ -d /usr/local/cuda ]; then cuda=ON; fi
[ "$cuda" = ON ] || echo "no CUDA toolkit here: the handlers of GPUs are left out"

for sanitizer in address,undefined thread; do
  echo "C++ tests under $sanitizer"
  build=$work/$sanitizer
  cmake -S . -B "$build" -G Ninja -DCMAKE_CXX_FLAGS="-O1 -DNDEBUG" -DJAX_MOE_LB_CUDA=$cuda \
    -DJAX_MOE_LB_SANITIZER="$sanitizer" -DPython_EXECUTABLE="$PWD/.venv/bin/python" \
    -Dnanobind_DIR="$(python -m nanobind --cmake_dir)" -Dpybind11_DIR="$(python -m pybind11 --cmakedir)" \
    > "$build.log" || { cat "$build.log"; exit 1; }
  cmake --build "$build" -j 2 --target cpp_tests
  # Three at a time on two cores, as tests of processes mostly wait for time-outs.
  ctest --test-dir "$build" -j 3 --output-on-failure --no-tests=error --timeout 300
  [ "${1:-}" = --nightly ] || continue
  for fuzz in "$build"/fuzz_*_test; do "$fuzz" 20000 "$(date +%Y%m%d)"; done
done
