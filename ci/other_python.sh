#!/usr/bin/env bash
# The whole suite once more on Python 3.11 with the newest jax that installs there, where one is found beside a newer Python.
set -euo pipefail
cd "$(dirname "$0")/.."
used=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
for python in python3.11 "$HOME"/.pyenv/versions/3.11.*/bin/python python3; do
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
  if [ "$version" = 3.11 ] && [ "$version" != "$used" ]; then
    exec make test VENV=.venv-3.11 PYTHON="$python"
  fi
done
echo "no Python 3.11 beside $used: its run is left out"
