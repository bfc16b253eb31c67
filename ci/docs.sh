#!/usr/bin/env bash
# The documentation as a site, in build/site; whatever MkDocs warns of is an error. `bash ci/docs.sh serve` shows it and
# follows edits. In a venv of its own without JAX, as names are read off the sources.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$PWD/.venv-docs
[ -x "$venv/bin/python" ] || .venv/bin/python -m venv --without-pip "$venv"
wanted=$(.venv/bin/python -c '
import tomllib
print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"]))')
.venv/bin/uv pip install -q --python "$venv/bin/python" -r - <<< "$wanted"
# A banner about the successor of the theme is no warning about these pages.
export NO_MKDOCS_2_WARNING=1
if [ "${1:-build}" = serve ]; then exec "$venv/bin/mkdocs" serve; fi
"$venv/bin/mkdocs" build -q --strict
echo "build/site: $(find build/site -name '*.html' | wc -l) pages, no warnings"
