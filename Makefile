# `make demo` and `make test` need nothing but Python >= 3.11: each makes .venv and installs into it first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
WORKERS ?= 2
BENCHMARKS := $(sort $(wildcard benchmarks/[a-z]*.py))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test lint types bench docs clean

help: ## List the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/\1\t\2/' | expand -t 12

install: $(INSTALLED) ## Make .venv and install the package into it, editable (done by the targets below)

# The stamp is written last, so an interrupted installation is done again.
$(INSTALLED): setup.cfg pyproject.toml
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --editable '.[dev,hf]'
	@touch $@

demo: $(INSTALLED) ## Train a small Llama on 4 local ranks and compare it with one device
	$(BIN)/stpart demo

# Each test process gets one thread: the workers share the cores. Tests of one group share what they captured.
test: $(INSTALLED) ## Run the tests (WORKERS=2 processes; ARGS="-k name" to choose)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

lint: $(INSTALLED) ## Check the code with ruff
	$(BIN)/ruff check .

types: $(INSTALLED) ## Check the types with mypy --strict
	$(BIN)/mypy

bench: $(INSTALLED) ## Run the benchmarks, one after the other
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script; done

docs: $(INSTALLED) ## Write the generated pages of docs/
	$(BIN)/python docs/generate.py

clean: ## Remove .venv, caches and build outputs
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
