# `make train` and `make test` each work on a fresh checkout.
VENV ?= .venv
# The newest Python that runs: the shims of version managers exist also where no Python stands behind them.
PYTHON ?= $(shell for p in python3.13 python3.12 $(HOME)/.pyenv/versions/3.13.*/bin/python \
  $(HOME)/.pyenv/versions/3.12.*/bin/python python3; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := $(VENV)/bin

.PHONY: train test lint clean
train: $(VENV)/.installed
	$(BIN)/python -m models.train --preset tiny $(ARGS)
test: $(VENV)/.installed
	$(BIN)/python -m pytest -q -n 2 $(ARGS)
lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q uv && \
	$(BIN)/uv pip install -q --compile-bytecode --python $(BIN)/python -e '.[dev]' || \
	$(BIN)/python -m pip install -q -e '.[dev]'
	touch $@
clean:
	rm -rf $(VENV) $(VENV)-* build dist
