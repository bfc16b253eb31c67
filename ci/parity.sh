#!/usr/bin/env bash
# Compare the models of models/ with transformers, the newest version and an older one for checkpoints, in a separate
# environment. It has no binaries, so every operation is plain JAX, and torch may use another Python than .venv.
# `parity.sh --nightly` also runs the thorough tests: every system, and bfloat16.
set -euo pipefail
cd "$(dirname "$0")/.."
markers=(-m 'not thorough')
[ "${1:-}" != --nightly ] || markers=()
venv=.venv-parity
torch="torch==2.13.0"
older="transformers==4.57.6"
# Every torch release supports Python 3.11. Its CPU build is a tenth as large.
base=$(bash ci/oldest_python.sh)
uv=$PWD/.venv/bin/uv
[ -x "$venv/bin/python" ] || "$base" -m venv --without-pip "$venv"
install() { "$uv" pip install -q --python "$venv/bin/python" "$@"; }
find_links=()
for folder in ${PIP_FIND_LINKS:-}; do find_links+=(--find-links "$folder"); done
install "${find_links[@]}" "$torch+cpu" 2> /dev/null ||
  install --extra-index-url https://download.pytorch.org/whl/cpu "$torch+cpu" 2> /dev/null || install "$torch"
install -e '.[train]' -C wheel.cmake=false pytest pytest-xdist beartype
# Models are tiny: further threads of torch only wait for one another, busily.
export OMP_NUM_THREADS=1
# Both share one compilation cache: see tests/parity/conftest.py.
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
export JAX_COMPILATION_CACHE_DIR=$cache JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
run_tests() {
  "$venv/bin/python" -c 'import transformers; print("transformers", transformers.__version__)'
  JAX_PLATFORMS=cpu "$venv/bin/python" -m pytest -q -n 2 -p no:cacheprovider tests/parity "${markers[@]}" "$@"
}
# Published chat templates are data of trl; its other dependencies are not needed.
install --no-deps trl
install "$older"
# The older version lacks some architectures, whose cases are thorough.
run_tests -k saved -m 'not thorough'
install --upgrade transformers peft compressed-tensors
# With transformers its renderer has chat templates, so that their tests run a second time.
run_tests tests/models/data/test_chat.py tests/models/data/test_messages.py
# The page of the recipe: answers of a tuned model, with reasoning and tool calls. Compilation dominates.
export XLA_FLAGS="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
JAX_PLATFORMS=cpu "$venv/bin/python" -m tests.parity.recipe .venv/bin/python
