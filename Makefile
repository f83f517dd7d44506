# `make` alone lists the targets. Everything runs in .venv, which `setup` makes once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Half of what plain PyTorch takes for the demo's step.
DEMO_BUDGET ?= 130MiB

# Threads that wait asleep: busy waiting takes four times as long where another job shares the cores.
export OMP_WAIT_POLICY ?= passive

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format bench clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

setup: $(STAMP) ## make .venv with the pinned development set and memfit itself

# Any Python without the venv module's pip (some Linux packages) falls back on virtualenv.
$(STAMP): requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m pip install virtualenv && $(PYTHON) -m virtualenv $(VENV); }
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -r requirements-dev.txt
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --editable .
	@touch $@

demo: $(STAMP) ## train BERT question answering in half the memory, on CPU
	$(BIN)/memfit run --budget $(DEMO_BUDGET) examples/bert_qa.py

# Two processes of one thread each: the suite is many small models.
test: $(STAMP) ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

check: $(STAMP) ## format, lint, types, tests: what a change must pass
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test

format: $(STAMP) ## format the code and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## measure W1-W4 under budgets against plain PyTorch and others (about 35 minutes on 2 cores)
	$(BIN)/python benchmarks/run.py -o benchmarks/results/cpu.json

clean: ## remove .venv and all caches
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
