# `make train`, `make check` and `make test` work on a fresh checkout; they require only Python and a C++ compiler.
VENV ?= .venv
# The newest working Python; version managers also leave shims for versions that are not installed.
PYTHON ?= $(shell for p in python3.13 python3.12 $(HOME)/.pyenv/versions/3.13.*/bin/python \
  $(HOME)/.pyenv/versions/3.12.*/bin/python python3; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := $(VENV)/bin
# Include directories, whose modification times change if a file is added or removed.
NATIVE := CMakeLists.txt $(shell find ffi)

# Child processes read compiled modules; without these each compiles every import.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train check test test-all lint reproduce gpu gpu-kit clean
train: $(VENV)/.installed
	$(BIN)/python -m models.train $(ARGS)
# Distribute by file, so that shared fixtures are built once, and in order, so that slow files start first.
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder
# Fast checks, about a minute.
check: lint
	$(PYTEST) -m 'not slow and not thorough' $(ARGS)
# One case per kind of fault; `test-all` runs all cases.
test: $(VENV)/.installed
	$(PYTEST) -m 'not thorough' $(ARGS)
test-all: $(VENV)/.installed
	$(PYTEST) $(ARGS)
# Reproduce the numbers and plots of the docs; ARGS=--quick uses smaller sizes.
reproduce: $(VENV)/.installed
	$(BIN)/python -m benchmarks.reproduce $(ARGS)
# Check all claims about GPUs on this machine, in parts of 8 minutes; ARGS=--dry-run runs without a GPU.
gpu: $(VENV)/.installed
	$(if $(findstring --dry-run,$(ARGS)),,$(call install,-e '.[cuda,train]' $(BUILD_OPTIONS)))
	$(BIN)/python -m benchmarks.gpu $(ARGS)
# Compile programs for GPUs that are absent, for a machine that has one for a short time: see docs/how-to/gpu.md.
GPU_PYTHON ?= $(shell for p in python3.12 $(HOME)/.pyenv/versions/3.12.*/bin/python; do \
  $$p -c '' 2>/dev/null && { echo $$p; break; }; done)
GPU_JAX ?= 0.11.2
GPU_TARGETS ?= h100 h200
# Compute capability of these; other GPUs compile the kernels at their load.
GPU_ARCHITECTURES ?= 90
KIT := $(VENV)-gpu-kit
gpu-kit: $(VENV)/.installed
	test -x $(KIT)/bin/python || $(BIN)/uv venv -q --python $(GPU_PYTHON) $(KIT)
	$(BIN)/uv pip install -q --python $(KIT)/bin/python $(BUILD_TOOLS) 'jax[cuda13]==$(GPU_JAX)' tokamax flax jaxtyping \
	  lazy_loader pydantic pyyaml rich scipy typer
	$(BIN)/uv pip install -q --python $(KIT)/bin/python --no-deps $(BUILD_OPTIONS) -C build-dir=build/gpu-kit/native \
	  -C cmake.define.JAX_MOE_LB_CUDA=ON -C 'cmake.define.JAX_MOE_LB_CUDA_ARCHITECTURES=$(GPU_ARCHITECTURES)' \
	  --target build/gpu-kit/package .
	mkdir -p build/gpu-kit/modules && cp build/gpu-kit/package/jax_moe_lb/*.so build/gpu-kit/modules
	$(BIN)/uv pip install -q --python $(KIT)/bin/python --target build/gpu-kit/packages pydantic
	$(BIN)/uv pip install -q --python $(KIT)/bin/python --target build/gpu-kit/packages --no-deps grain array-record \
	  portpicker
	PYTHONPATH=. $(KIT)/bin/python -m benchmarks.gpu.ahead --targets $(GPU_TARGETS) $(ARGS)
lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python ci/words.py > /dev/null
	$(BIN)/python ci/docstrings.py
	$(BIN)/clang-format --dry-run --Werror $(filter %.cc %.h,$(NATIVE))
# Run a script of ci/ on a fresh checkout, for example `make ci-docs`.
ci-%: $(VENV)/.installed
	bash ci/$*.sh $(ARGS)

# Build without isolation: against the jaxlib used by the tests, and incrementally, in build/.
BUILD_OPTIONS := --no-build-isolation
BUILD_TOOLS := scikit-build-core nanobind pybind11 cmake ninja jax
# install(arguments): use uv, or pip if uv is not available.
install = if [ -x $(BIN)/uv ]; then $(BIN)/uv pip install -q --python $(BIN)/python $(1); \
  else $(BIN)/python -m pip install -q $(1); fi

define install_all
$(PYTHON) -m venv $(VENV)
$(BIN)/python -m pip install -q uv || echo "uv is not available; using pip"
$(call install,$(BUILD_TOOLS))
$(call install,$(BUILD_OPTIONS) -e '.[dev]')
endef

# Resolve dependencies only if pyproject.toml changed. Build again after another jaxlib was installed.
$(VENV)/.installed: pyproject.toml $(NATIVE) $(wildcard $(VENV)/lib/python3.*/site-packages/jaxlib-*.dist-info)
	$(if $(filter pyproject.toml,$?),$(install_all),$(call install,$(BUILD_OPTIONS) --no-deps -e .))
	touch $@
clean:
	rm -rf $(VENV) $(VENV)-* build dist
