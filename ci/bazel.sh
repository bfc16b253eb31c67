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
# This checks the rules, so do not optimize. Leave out long tests, the random calls and those of kernels, which the
# sanitizers run.
run_bazel test "${config[@]}" --compilation_mode=fastbuild --jobs=2 --noshow_progress -- //... \
  $(cd ffi && find . -name 'fuzz_*_test.cc' -o -name '*_block_test.cc' | sed 's|.*/\(.*\)\.cc|-//ffi:\1|')
