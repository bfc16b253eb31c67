#!/usr/bin/env bash
# The first hour of a new user: clone, install without and then with a C++ compiler, train a step of a small layer, and
# run programs of the README and of the pages, one a page: first those that run after `pip install .` alone, then the
# others. `make test-all` runs every program.
# `new_user.sh --wheel FOLDER` installs the wheel in the output folder of archives.sh instead of compiling the clone.
set -euo pipefail
cd "$(dirname "$0")/.."
checkout=$PWD
wheels=
[ "${1:-}" != --wheel ] || wheels=$(realpath "$2")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git clone -q . "$work/clone"
base=$checkout/.venv/bin/python
[ -z "$wheels" ] || base=$(bash ci/oldest_python.sh)
"$base" -m venv --without-pip "$work/venv"
python=$work/venv/bin/python
install() { "$checkout/.venv/bin/uv" pip install -q --python "$python" "$@"; }
# Outside the clone, which would shadow the installation.
run() { (cd "$work" && JAX_PLATFORMS=cpu PATH="$work/venv/bin:$PATH" "$@"); }
expect() { grep -qF "$2" "$1" || { cat "$1"; echo "expected in $1: $2"; exit 1; }; }
binaries() { find "$work/venv/lib" -path '*/jax_moe_lb/*.so'; }

# All programs of the path except compilers, which remain in /usr/bin.
mkdir "$work/bin"
IFS=: read -ra folders <<< "$PATH"
for folder in "${folders[@]}"; do
  for program in "$folder"/*; do
    case ${program##*/} in c++* | g++* | gcc* | cc | CC | *clang* | icpx | xlC | *-g++* | *-gcc* | *-c++*) ;;
      *) [ -e "$work/bin/${program##*/}" ] || ln -s "$program" "$work/bin/" 2> /dev/null || true ;;
    esac
  done
done
without_compilers() {
  (unset CC CXX; PATH=$work/bin "$@")
}
cat > "$work/step.py" <<'PY'
import jax
from flax import nnx
from jax.sharding import AxisType

from jax_moe_lb import ExpertConfig, MoE, TopK, greedy, use_virtual_cpu_devices

use_virtual_cpu_devices(4)
mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,))
layer = MoE(16, 8, TopK(2), mesh=mesh, system=greedy(2), experts=ExpertConfig(32), rngs=nnx.Rngs(0))
x = jax.random.normal(jax.random.key(0), (64, 16)) + 1


@nnx.jit
def step(layer, x):
    def loss(layer):
        y, stats = layer(x)
        return ((y - x) ** 2).mean(), stats

    (value, stats), gradients = nnx.value_and_grad(loss, has_aux=True)(layer)
    parameters = nnx.state(layer, nnx.Param)
    nnx.update(layer, jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, parameters, gradients))
    return value, stats


first, stats = step(layer, x)
for _ in range(5):
    last, _ = step(layer, x)
assert last < first and stats.imbalance_after[0] < stats.imbalance_before[0], (first, last, stats)
print(f"loss {first:.4f} -> {last:.4f}")
PY

echo "== without a compiler =="
without_compilers install "$work/clone" --no-cache-dir
[ -z "$(binaries)" ] || { echo "an installation without a compiler has $(binaries)"; exit 1; }
if without_compilers run jax-moe-lb doctor 2> "$work/doctor"; then echo "a command ran without its extra"; exit 1; fi
expect "$work/doctor" "error: pydantic is not installed; run pip install 'jax_moe_lb[tools]'"
without_compilers install "jax_moe_lb[tools] @ file://$work/clone" --no-cache-dir
without_compilers run jax-moe-lb doctor --json > "$work/doctor"
expect "$work/doctor" "pure JAX, without extension modules; for faster planners install a C++17 compiler"
run python "$work/step.py" 2> "$work/warnings"
expect "$work/warnings" "jax_moe_lb was installed without extension modules and runs in plain JAX; run jax-moe-lb doctor"

echo "== with a compiler that fails =="
if CXX=/bin/false install --reinstall --no-deps "$work/clone" > "$work/log" 2>&1; then
  echo "a build with a broken compiler did not fail"
  exit 1
fi
expect "$work/log" "To install without them, in pure JAX, run: pip install . -C wheel.cmake=false"
[ "$(wc -l < "$work/log")" -lt 40 ] || { cat "$work/log"; echo "expected an error of fewer than 40 lines"; exit 1; }

echo "== with a compiler =="
source=$work/clone
if [ -n "$wheels" ]; then
  tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
  source=$(realpath "$wheels"/*-"$tag"-*.whl)
fi
install --reinstall --no-deps "$source"
[ "$(binaries | wc -l)" -ge 2 ] || { echo "no extension modules: $(binaries)"; exit 1; }
if [ -z "$wheels" ] && ! compgen -G '/dev/nvidia*' > /dev/null && ! [ -e /dev/dxg ] && binaries | grep _ffi_cuda; then
  echo "an installation on a machine without a GPU has custom calls for GPUs"
  exit 1
fi
run jax-moe-lb doctor --json > "$work/doctor"
expect "$work/doctor" '"pure_jax": null'
run python "$work/step.py" 2> "$work/warnings"
if grep -q "extension modules" "$work/warnings"; then cat "$work/warnings"; exit 1; fi

echo "== programs of the README and of the pages =="
pages=("$work/clone/README.md")
while read -r page; do pages+=("$page"); done < <(find "$work/clone/docs" -name '*.md' | sort)
# The programs are small, so compilation dominates; without optimizations it takes a third less time.
export XLA_FLAGS="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
programs() { run python "$work/clone/tests/page_blocks.py" --first "$1" "${pages[@]}"; }
programs ""
programs "pip install '.[tools]'"
install flatbuffers
programs "pip install flatbuffers"
install "jax_moe_lb[models] @ file://$source"
programs "a checkout and pip install '.[models]'"
