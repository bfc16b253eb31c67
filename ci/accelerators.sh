#!/usr/bin/env bash
# Compile layers and models for GPUs and TPUs not present, and check limits: see accelerators.py. With --nightly, compile
# every system, and a training step for a TPU.
# Installs the compilers, including one for CUDA C++, into a separate venv (5 GB, about a minute).
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$PWD/.venv-accelerators
.venv/bin/python -m venv --without-pip "$venv"
install() { .venv/bin/uv pip install -q --python "$venv/bin/python" "$@"; }
install "jax[cuda13,tpu]" cmake ninja nanobind pybind11 scikit-build-core
# These packages provide only the versioned libcudart; CMake looks for libcudart.so.
toolkit=$(echo "$venv"/lib/python3.*/site-packages/nvidia/cu13)
cudart=$(echo "$toolkit"/lib/libcudart.so.*)
# Use a separate folder, as the other build has another toolkit or none.
# No kernel or handler runs here, so they are not optimized, and ci/kernels.py compiles the kernels for a GPU.
CUDAToolkit_ROOT=$toolkit install --no-build-isolation -C build-dir=build/accelerators -C cmake.build-type=None \
  -C cmake.define.JAX_MOE_LB_CUDA=ON -C cmake.define.CUDA_CUDART="$cudart" -e '.[cuda,tpu,train]'
nightly=()
[[ " $* " != *" --nightly "* ]] || nightly=(--nightly)
# One compiler runs beside the other.
"$venv/bin/python" ci/kernels.py "$toolkit/bin/nvcc" "${nightly[@]}" &
kernels=$!
"$venv/bin/python" ci/recorded_rates.py
"$venv/bin/python" ci/hopper_kernels.py
"$venv/bin/python" -m tests.models.compile_reference "${nightly[@]}"
wait "$kernels"
"$venv/bin/python" tests/page_blocks.py "pip install '.[cuda]'" docs/compiling.md
exec "$venv/bin/python" ci/accelerators.py "$@"
