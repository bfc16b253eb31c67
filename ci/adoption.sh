#!/usr/bin/env bash
# Models of Tunix, MaxText and EasyDeL equal themselves after `balance`, each in a virtual environment of its own: the
# packages are large, and EasyDeL requires an older JAX. Also runs the program of each library's page.
# `bash ci/adoption.sh tunix` runs one of them.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=$PWD/.venv/bin/uv
find_links=()
for folder in ${PIP_FIND_LINKS:-}; do find_links+=(--find-links "$folder"); done
# python_of(minor): that Python if there is one, else the one of .venv.
python_of() {
  local base=.venv/bin/python
  for python in "python3.$1" "$HOME"/.pyenv/versions/3."$1".*/bin/python; do
    if "$python" -c "import sys; sys.exit(sys.version_info[:2] != (3, $1))" 2> /dev/null; then base=$python; break; fi
  done
  echo "$base"
}
install() { "$uv" pip install -q --python "$venv/bin/python" "$@"; }
install_tunix() { install google-tunix==0.1.7; }
# MaxText has dependencies only in its extras for accelerators; these are the ones that its layers import.
install_maxtext() {
  install drjax einshape flax grain immutabledict jax jinja2 ml_collections optax orbax-checkpoint pathwaysutils pillow \
    sentencepiece sympy tiktoken transformers xprof
  install --no-deps maxtext==0.2.5 tokamax qwix aqtp omegaconf antlr4-python3-runtime==4.9.3
}
# Its kernels, ejkernel 0.0.78, require jax<0.10 and this library jax>=0.10; its models import torch.
install_easydel() {
  local torch="torch==2.13.0"
  install "${find_links[@]}" "$torch+cpu" 2> /dev/null ||
    install --extra-index-url https://download.pytorch.org/whl/cpu "$torch+cpu" 2> /dev/null || install "$torch"
  install --overrides <(printf 'jax>=0.10,<0.11\njaxlib>=0.10,<0.11\n') easydel==0.3.0 pillow
}
declare -A titles=([tunix]=Tunix [maxtext]=MaxText [easydel]=EasyDeL)
for name in ${*:-tunix maxtext easydel}; do
  venv=.venv-$name
  base=.venv/bin/python
  # Every release of torch is built for Python 3.11.
  if [ "$name" = easydel ]; then base=$(python_of 11); fi
  [ -x "$venv/bin/python" ] || "$base" -m venv --without-pip "$venv"
  "install_$name"
  # Without binaries every operation is plain JAX. No dependencies: those of the library above stay.
  install beartype jaxtyping lazy_loader pydantic pytest pyyaml rich scipy typer
  install --no-deps -e . -C wheel.cmake=false
  echo "== $name =="
  "$venv/bin/python" -c 'import flax, jax; print("jax", jax.__version__, "flax", flax.__version__)'
  "$venv/bin/python" tests/page_blocks.py "${titles[$name]}" "docs/how-to/$name.md"
  JAX_PLATFORMS=cpu "$venv/bin/python" -m pytest -q -s -W ignore -p no:cacheprovider "tests/adoption/test_$name.py"
done
