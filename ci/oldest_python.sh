#!/usr/bin/env bash
# Print the path of Python 3.11, the oldest supported one, or of .venv's if there is none.
set -euo pipefail
cd "$(dirname "$0")/.."
for python in python3.11 "$HOME"/.pyenv/versions/3.11.*/bin/python python3; do
  if "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2> /dev/null; then
    command -v "$python"
    exit
  fi
done
echo "no Python 3.11 here: its run is left out" >&2
echo "$PWD/.venv/bin/python"
