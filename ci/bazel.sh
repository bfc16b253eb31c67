#!/usr/bin/env bash
# Build the extension modules and run the C++ tests with Bazel; the only download is Bazel itself.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v bazel > /dev/null; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "no bazel here, and no right to install it: apt-get install bazel-bootstrap"
    exit 1
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends bazel-bootstrap > /dev/null
fi
outputs=$(mktemp -d)
run_bazel() { VIRTUAL_ENV=$PWD/.venv bazel --output_user_root="$outputs" "$@"; }
trap 'run_bazel shutdown; chmod -R u+w "$outputs"; rm -rf "$outputs"' EXIT
# The configuration adds the CUDA module to the targets.
config=()
if command -v nvcc > /dev/null; then config=(--config=cuda); fi
# Leave out the random calls, which the sanitizers make.
run_bazel test "${config[@]}" --jobs=2 --noshow_progress -- //... \
  $(cd ffi/testing && printf -- '-//ffi:%s ' fuzz_*_test.cc | sed 's/\.cc//g')
