PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# This release comes as a CPU build; an unpinned torch brings gigabytes of CUDA with it.
TORCH ?= torch==2.13.0
JOBS ?= 2

.PHONY: help demo test test-all lint docs bench clean

help:  ## show this help
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

# Networks this small run fastest on one thread.
demo: export OMP_NUM_THREADS ?= 1
demo: $(VENV)/installed  ## train a plain flow and a CIF on two boxes, and compare them
	$(BIN)/ciflows compare two-uniforms resflow cif-resflow --config demo --out runs/demo --resume

test: $(VENV)/installed  ## run the tests, in under ten minutes
	$(BIN)/python -m pytest -n $(JOBS)

test-all: $(VENV)/installed  ## run the slow tests too
	$(BIN)/python -m pytest -n $(JOBS) -m "slow or not slow"

lint: $(VENV)/installed  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/sphinx: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	touch $@

docs: $(VENV)/sphinx  ## build the pages into docs/_build/html
	$(BIN)/python -m sphinx -W --keep-going --quiet docs docs/_build/html

bench: $(VENV)/installed  ## time training, likelihoods and sampling, beside other libraries
	$(BIN)/ciflows bench --document docs/performance.md

clean:  ## remove the environment, the pages and what the demo made
	rm -rf $(VENV) docs/_build runs/demo
