#!/usr/bin/env bash
# Test a wheel as users install it: built in isolation from the sdist, then used outside the checkout with the newest
# compatible jax. Prefers Python 3.11, as all other checks use a newer one. `wheel.sh FOLDER` takes the wheel from the
# output folder of archives.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
uv=$PWD/.venv/bin/uv
base=$(bash ci/oldest_python.sh)
dist=${1:-$work/dist}
[ $# -gt 0 ] || { mkdir "$dist"; bash ci/archives.sh "$dist" "$base"; }

"$base" -m venv --without-pip "$work/venv"
python=$work/venv/bin/python
tag=$("$base" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
wheel=$(realpath "$dist"/*-"$tag"-*.whl)
"$uv" pip install -q --python "$python" --upgrade "jax_moe_lb[dev] @ file://$wheel"

# Copy the files read by tests, except the package, which comes from the wheel.
mkdir "$work/checkout"
git ls-files -z | grep -zv '^jax_moe_lb/' | tar c --null -T - | tar x -C "$work/checkout"
cd "$work/checkout"
package=$("$python" -c 'import importlib.util as u, pathlib as p; print(p.Path(u.find_spec("jax_moe_lb").origin).parent)')
case $package in "$work"/venv/*) ;; *) echo "jax_moe_lb is $package; expected the wheel's"; exit 1 ;; esac
# archives.sh builds the CUDA handlers if a toolkit is found, and only then.
toolkit=no cuda=no
if command -v nvcc > /dev/null || [ -d /usr/local/cuda ]; then toolkit=yes; fi
if ls "$package"/_ffi_cuda*.so; then cuda=yes; fi
[ $cuda = $toolkit ] || { echo "CUDA toolkit: $toolkit; _ffi_cuda in the wheel: $cuda"; exit 1; }
for module in "$package"/*.so; do
  if ldd "$module" | grep -E 'libcuda|libcudart|not found'; then
    echo "$module needs a library that a machine without a GPU lacks"
    exit 1
  fi
done
# The import must also succeed if the CUDA module finds no GPU or driver.
JAX_PLATFORMS=cpu "$python" -c 'from jax_moe_lb.core import custom_calls; custom_calls.register()'
JAX_PLATFORMS=cpu "$work/venv/bin/jax-moe-lb" doctor
# The wheel must contain the presets.
JAX_PLATFORMS=cpu "$work/venv/bin/jax-moe-lb" simulate h100_node --json >/dev/null
# Run tests of small programs, the gradients of two systems, and every custom call.
run_tests() { JAX_PLATFORMS=cpu "$python" -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -p no:cacheprovider "$@"; }
# Only of the rooms that depend on the versions of JAX and Python; make test-all runs the others.
rooms=(core routing kernels collectives transport layer nn balancers cli)
run_tests -m 'not slow and not thorough' "${rooms[@]/#/tests/}"
run_tests tests/collectives/test_exchange_faults.py tests/collectives/test_plan_and_copy.py
run_tests tests/balancers/test_conformance.py -k 'test_layer_equals_dense and float64 and (feplb or sprayed)'
