#!/usr/bin/env bash
# On Python 3.11, with the newest jax that installs there: the tests that compile little, and the layer in all its forms.
# Runs where a Python 3.11 is found beside a newer one.
set -euo pipefail
cd "$(dirname "$0")/.."
used=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
for python in python3.11 "$HOME"/.pyenv/versions/3.11.*/bin/python python3; do
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
  if [ "$version" = 3.11 ] && [ "$version" != "$used" ]; then
    make test VENV=.venv-3.11 PYTHON="$python" ARGS="-m 'not slow'"
    make test VENV=.venv-3.11 PYTHON="$python" ARGS="tests/test_pipeline.py tests/nn/test_moe.py tests/transport/test_staged.py"
    # The gradients of every system.
    exec make test VENV=.venv-3.11 PYTHON="$python" \
      ARGS="tests/balancers/test_conformance.py -k 'test_layer_equals_dense and float64'"
  fi
done
echo "no Python 3.11 beside $used: its run is left out"
