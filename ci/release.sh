#!/usr/bin/env bash
# Build a release, and optionally upload it: release.sh [--upload]. Builds an sdist and a wheel for each Python found
# into dist/, checks them and tests the installed wheels. With --upload, requires a clean, tagged commit and a dated
# changelog, and uploads the files.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' jax_moe_lb/__init__.py)
entry=$(grep -F "## [$version]" CHANGELOG.md) || { echo "CHANGELOG.md has no entry for $version"; exit 1; }
case ${1:-} in
  '') upload=no ;;
  --upload) upload=yes ;;
  *) echo "expected --upload or nothing, not $1"; exit 2 ;;
esac
if [ $upload = yes ]; then
  [ -z "$(git status --porcelain)" ] || { echo "the checkout has changes; expected none"; exit 1; }
  [ "$(git describe --tags --exact-match 2> /dev/null)" = "v$version" ] || { echo "expected the tag v$version here"; exit 1; }
  [[ $entry =~ [0-9]{4}-[0-9]{2}-[0-9]{2}$ ]] || { echo "expected a date in CHANGELOG.md: $entry"; exit 1; }
fi

rm -rf dist
mkdir dist
built=" "
for python in python3.1{1,2,3} "$HOME"/.pyenv/versions/3.1{1,2,3}.*/bin/python .venv/bin/python; do
  found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null) || continue
  case $built in *" $found "*) continue ;; esac
  bash ci/archives.sh dist "$(command -v "$python")"
  built+="$found "
done
bash ci/docs.sh
bash ci/wheel.sh dist
echo "dist/ holds $version for Python$built"
if [ $upload = yes ]; then
  .venv/bin/uv tool run -q --from 'twine>=6,<8' twine upload dist/*
else
  echo "not uploaded; to do it: git tag v$version && bash ci/release.sh --upload"
fi
