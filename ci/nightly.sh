#!/usr/bin/env bash
# All tests on the newest nightly build of JAX, with extension modules built against its headers. In an environment of
# its own. JAX_INDEX names another package index for jax and jaxlib.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-nightly
index=${JAX_INDEX:-https://us-python.pkg.dev/ml-oss-artifacts-published/jax/simple/}
make VENV="$venv" "$venv/.installed"
install() { "$venv/bin/uv" pip install -q --python "$venv/bin/python" "$@"; }
# The dependencies of jax are not on its index.
install --upgrade --prerelease allow --index-strategy unsafe-best-match --extra-index-url "$index" jax jaxlib
# jaxlib accepts custom calls built with its own headers or older ones.
install --no-build-isolation --no-deps --reinstall -C build-dir=build/nightly -e .
"$venv/bin/jax-moe-lb" doctor
make VENV="$venv" test
