#!/usr/bin/env bash
# Build the CUDA module with the static runtime of CUDA 12.9, the oldest on PyPI, and run the tests of drivers:
# cuda12.sh [VENV]. PyPI has no nvcc of CUDA 12, so this build has no kernels, and planners run on the host.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(realpath "${1:-.venv}")
export PATH=$venv/bin:$PATH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
uv pip install -q --python "$venv/bin/python" --target "$work/packages" --no-deps \
  nvidia-cuda-runtime-cu12==12.9.79 nvidia-cuda-nvcc-cu12==12.9.86
# CMake finds a toolkit by its nvcc or this file. The second package has headers of the first.
mkdir "$work/toolkit"
cp -rs "$work"/packages/nvidia/cuda_runtime/* "$work/toolkit"
cp -rs "$work"/packages/nvidia/cuda_nvcc/include/crt "$work/toolkit/include"
echo '{"cuda": {"version": "12.9.79"}}' > "$work/toolkit/version.json"
CUDAToolkit_ROOT=$work/toolkit cmake -S . -B "$work/build" -G Ninja -DCMAKE_CXX_FLAGS="-O0 -DNDEBUG" \
  -DJAX_MOE_LB_CUDA=ON -DCUDA_CUDART="$work/toolkit/lib/libcudart.so.12" \
  -DPython_EXECUTABLE="$venv/bin/python" -Dnanobind_DIR="$(python -m nanobind --cmake_dir)" \
  -Dpybind11_DIR="$(python -m pybind11 --cmakedir)" > "$work/log" || { cat "$work/log"; exit 1; }
cmake --build "$work/build" -j 2 --target _ffi_cuda stand_in_driver_test
for part in driver functions kernels old_driver; do "$work/build/stand_in_driver_test" "$part"; done
cd "$work/build"
python - <<'CODE'
import _ffi_cuda

assert _ffi_cuda.why_unusable() is None
assert not hasattr(_ffi_cuda, "kernel_fits")
names = set(_ffi_cuda.registrations()["handlers"])
assert "moe_lb_copy_start" in names
assert not any(name.endswith("_kernel") for name in names)
CODE
