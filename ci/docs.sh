#!/usr/bin/env bash
# Build the documentation site in build/site; MkDocs warnings are errors. `bash ci/docs.sh serve` serves it with live
# reload. Uses a separate venv without JAX, as the API reference is generated from the sources.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$PWD/.venv-docs
[ -x "$venv/bin/python" ] || .venv/bin/python -m venv --without-pip "$venv"
wanted=$(.venv/bin/python -c '
import tomllib
print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"]))')
.venv/bin/uv pip install -q --python "$venv/bin/python" -r - <<< "$wanted"
# Disable the theme's banner about its successor, which is not a warning about these pages.
export NO_MKDOCS_2_WARNING=1
if [ "${1:-build}" = serve ]; then exec "$venv/bin/mkdocs" serve; fi
# A clone of a remote repository links to it from all pages.
PYTHONPATH=ci "$venv/bin/python" - <<'PY'
from site_hooks import REMOTE

for remote in ("https://host.org/a/b.git", "https://user:key@host.org/a/b", "git@host.org:a/b.git", "ssh://git@host.org/a/b"):
    assert REMOTE.fullmatch(remote).groups() == ("host.org", "a/b"), remote
assert not REMOTE.fullmatch("/tmp/clone")
PY
"$venv/bin/mkdocs" build -q --strict
echo "build/site: $(find build/site -name '*.html' | wc -l) pages, no warnings"
