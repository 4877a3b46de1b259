# Everything lives in .venv; `install` does nothing when it is current.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml $(wildcard custom_calls/csrc/*)

# The kernels of these are used, their Python is not: without dependencies, PyTorch among them.
KERNELS := sgl-deep-gemm==0.2.5 sgl-deep-ep==0.1.2.post1

.PHONY: install install-cuda run test test-gpu lint

install: $(VENV)/.installed

install-cuda: $(VENV)/.installed-cuda

run: install
	$(BIN)/jaxmoe serve $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-gpu: $(VENV)/.installed-test $(VENV)/.installed-cuda
	$(BIN)/python -m pytest -n 0 -m "gpu or multi_gpu" $(ARGS)

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# The handlers are compiled against the headers of the jaxlib they will be loaded into, hence no
# build isolation.
$(VENV)/.installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "jax>=0.10.2" "scikit-build-core>=0.11" "nanobind>=2.4" "cmake>=3.24" "ninja>=1.11"
	$(BIN)/python -m pip install -q --no-build-isolation --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install -q --no-build-isolation --editable ".[test]"
	touch $@

$(VENV)/.installed-cuda: $(VENV)/.installed
	$(BIN)/python -m pip install -q --no-build-isolation --editable ".[cuda]"
	$(BIN)/python -m pip install -q --no-deps $(KERNELS)
	touch $@

$(VENV)/.installed-lint: $(VENV)/.installed-test
	$(BIN)/python -m pip install -q --no-build-isolation --editable ".[lint]"
	touch $@
