#!/usr/bin/env bash
# A wheel as users get it: built in isolation from the sdist, then used outside the checkout on the newest jax.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
uv=$PWD/.venv/bin/uv
"$uv" build --python .venv/bin/python --out-dir "$work/dist" . 2> "$work/log" || { cat "$work/log"; exit 1; }
.venv/bin/python ci/check_archives.py "$work"/dist/*

.venv/bin/python -m venv --without-pip "$work/venv"
python=$work/venv/bin/python
"$uv" pip install -q --python "$python" --upgrade "$work"/dist/*.whl jax beartype hypothesis pytest pytest-xdist

# pyproject.toml is that of the checkout, for pytest's options; the package is not there.
cp -r pyproject.toml benchmarks tests "$work"
cd "$work"
package=$("$python" -c 'import importlib.util as u, pathlib as p; print(p.Path(u.find_spec("jax_moe_lb").origin).parent)')
case $package in "$work"/venv/*) ;; *) echo "jax_moe_lb is $package; expected the wheel's"; exit 1 ;; esac
if command -v nvcc > /dev/null && ! ls "$package"/_ffi_cuda*.so; then
  echo "nvcc is here, and the wheel has no _ffi_cuda"
  exit 1
elif ! command -v nvcc > /dev/null && [ ! -d /usr/local/cuda ] && ls "$package"/_ffi_cuda*.so; then
  echo "no nvcc is here, and the wheel has _ffi_cuda"
  exit 1
fi
for module in "$package"/*.so; do
  if ldd "$module" | grep -E 'libcuda|libcudart|not found'; then
    echo "$module needs a library that a machine without a GPU lacks"
    exit 1
  fi
done
# Also where the CUDA module finds neither a GPU nor a driver.
JAX_PLATFORMS=cpu "$python" -c 'from jax_moe_lb import _custom_calls; _custom_calls.register()'
JAX_PLATFORMS=cpu "$work/venv/bin/jax-moe-lb" doctor
# Its presets are in the wheel.
JAX_PLATFORMS=cpu "$work/venv/bin/jax-moe-lb" simulate h100_node --json >/dev/null
# Every custom call, and the planners on NumPy arrays.
"$python" -m pytest -q -n 2 -p no:cacheprovider tests/test_planning_module.py tests/planners/test_planners.py \
  tests/ops/test_grouped_matmul.py tests/ops/test_exchange_faults.py tests/ops/test_plan_and_copy.py
