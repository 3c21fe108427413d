PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
# PyTorch's own index has CPU builds; on Linux those of PyPI come with 5 GB of CUDA.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
JOBS ?= 2

.PHONY: help demo test test-all lint docs bench clean

help:  ## show this help
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-deps --retries 0 --timeout 10 --index-url $(TORCH_INDEX) "$(TORCH)" || \
	    echo "No CPU build of PyTorch there: taking the one that pip finds."
	$(PIP) "$(TORCH)"
	$(PIP) -e ".[dev]"
	touch $@

# Networks this small run fastest on one thread.
demo: export OMP_NUM_THREADS ?= 1
demo: $(VENV)/installed  ## train a plain flow and a CIF on two boxes and compare them
	$(BIN)/ciflows compare two-uniforms resflow cif-resflow --config demo --out runs/demo --resume

test: $(VENV)/installed  ## run the tests, in under ten minutes
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-all: $(VENV)/installed  ## run the slow tests too
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "slow or not slow"

lint: $(VENV)/installed  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/sphinx: $(VENV)/installed
	$(PIP) -e ".[docs]"
	touch $@

# -E reads all pages again: without it, a second build's search forgets the index entries of unchanged pages.
docs: $(VENV)/sphinx  ## build the pages into docs/_build/html
	$(BIN)/python -m sphinx -W -E --keep-going --quiet docs docs/_build/html

bench: $(VENV)/installed  ## time training, likelihoods and sampling beside other libraries
	$(BIN)/python -m benchmarks --document docs/performance-tables.md

clean:  ## remove the environment, the built pages and the demo's runs
	rm -rf $(VENV) docs/_build runs/demo
