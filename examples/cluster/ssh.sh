#!/usr/bin/env bash
# Start one process on each given machine; all must have this checkout and its .venv at the same path:
#   examples/cluster/ssh.sh node1 node2 -- reference --run-dir /shared/runs/first
# Add --resume=auto after the last -- to continue from the newest checkpoint, if there is one.
set -euo pipefail
hosts=()
while [ $# -gt 0 ] && [ "$1" != "--" ]; do hosts+=("$1") && shift; done
if [ ${#hosts[@]} = 0 ] || [ $# = 0 ]; then
  echo "usage: $0 HOST... -- OPTIONS"
  exit 2
fi
shift
options=$(printf '%q ' "$@")
cd "$(dirname "$0")/../.."
processes=()
for i in "${!hosts[@]}"; do
  place="--distributed --set multi_process.coordinator=${hosts[0]}:9911"
  place+=" --set multi_process.num_processes=${#hosts[@]} --set multi_process.process_id=$i"
  # With -tt, Ctrl-C reaches all processes.
  ssh -tt "${hosts[$i]}" "cd $(printf '%q' "$PWD") && exec .venv/bin/python -m models.train $place $options" &
  processes+=($!)
done
code=0
for process in "${processes[@]}"; do wait "$process" || code=$?; done
exit "$code"
