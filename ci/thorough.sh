#!/usr/bin/env bash
# Run a sixth of the thorough tests: every sixth file, another sixth each day. `thorough.sh 2` runs the third sixth.
set -euo pipefail
cd "$(dirname "$0")/.."
share=${1:-$(($(date +%s) / 86400 % 6))}
mapfile -t files < <(git ls-files 'tests/test_*.py' 'tests/**/test_*.py' |
  grep -vE '^tests/(parity|adoption|gpu)/' | awk -v share="$share" 'NR % 6 == share')
echo "share $share of 6: ${#files[@]} files"
.venv/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m 'thorough and not gpu' "${@:2}" "${files[@]}"
