#!/usr/bin/env bash
# Compiles every system for GPUs and TPUs that are not here, and holds limits on what comes out: see accelerators.py.
# It installs the compilers into a venv of its own: 5 GB, in a minute. A compiler for CUDA C++ comes with them.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$PWD/.venv-accelerators
.venv/bin/python -m venv --without-pip "$venv"
install() { .venv/bin/uv pip install -q --python "$venv/bin/python" "$@"; }
install "jax[cuda13,tpu]" cmake ninja nanobind pybind11 scikit-build-core
# The toolkit of these packages has no libcudart.so that CMake looks for, only that of its version.
toolkit=$(echo "$venv"/lib/python3.*/site-packages/nvidia/cu13)
cudart=$(echo "$toolkit"/lib/libcudart.so.*)
# Not in the folder of the other build, which is for another toolkit or none.
CUDAToolkit_ROOT=$toolkit install --no-build-isolation -C build-dir=build/accelerators \
  -C cmake.define.JAX_MOE_LB_CUDA=ON -C cmake.define.CUDA_CUDART="$cudart" -e '.[cuda,tpu,train]'
"$venv/bin/python" -m tests.models.compile_reference
# The program of a page, as it stands.
"$venv/bin/python" -c "$(sed -n '/^```python$/,/^```$/{/^```/!p}' docs/compiling.md)"
exec "$venv/bin/python" ci/accelerators.py "$@"
