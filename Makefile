# `make train`, `make check` and `make test` each work on a fresh checkout, with Python and a C++ compiler alone.
VENV ?= .venv
# The newest Python that runs: the shims of version managers exist also where no Python stands behind them.
PYTHON ?= $(shell for p in python3.13 python3.12 $(HOME)/.pyenv/versions/3.13.*/bin/python \
  $(HOME)/.pyenv/versions/3.12.*/bin/python python3; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := $(VENV)/bin
# Directories too: their times change when a file is added or removed.
NATIVE := CMakeLists.txt $(shell find ffi)

.PHONY: train check test test-all lint reproduce clean
train: $(VENV)/.installed
	$(BIN)/python -m models.train $(ARGS)
# A file at a time, so that what its tests share is made once, and in order: the slowest files are not the last.
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder
# The inner loop: about two minutes.
check: lint
	$(PYTEST) -m 'not slow and not thorough and not gpu' $(ARGS)
# One case of each kind of fault; `test-all` has the others.
test: $(VENV)/.installed
	$(PYTEST) -m 'not thorough and not gpu' $(ARGS)
test-all: $(VENV)/.installed
	$(PYTEST) $(ARGS)
# Every number and plot of the documents; ARGS=--quick for a look at smaller ones.
reproduce: $(VENV)/.installed
	$(BIN)/python -m benchmarks.reproduce $(ARGS)
lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(filter %.cc %.h,$(NATIVE))
# One script of ci/ on a fresh checkout, for example `make ci-docs`.
ci-%: $(VENV)/.installed
	bash ci/$*.sh $(ARGS)

# Not isolated: built against the jaxlib that the tests run on, and incrementally, in build/.
BUILD_TOOLS := scikit-build-core nanobind pybind11 cmake ninja jax
# install(arguments): with uv, or with pip where uv cannot be had.
install = if [ -x $(BIN)/uv ]; then $(BIN)/uv pip install -q --compile-bytecode --python $(BIN)/python $(1); \
  else $(BIN)/python -m pip install -q $(1); fi

define install_all
$(PYTHON) -m venv $(VENV)
$(BIN)/python -m pip install -q uv || echo "no uv here: going on with pip"
$(call install,$(BUILD_TOOLS))
$(call install,--no-build-isolation -e '.[dev]')
endef

# Dependencies are resolved again only where they may have changed.
$(VENV)/.installed: pyproject.toml $(NATIVE)
	$(if $(filter pyproject.toml,$?),$(install_all),$(call install,--no-build-isolation --no-deps -e .))
	touch $@
clean:
	rm -rf $(VENV) $(VENV)-* build dist
