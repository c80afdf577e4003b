# Every task of the project. `make` alone lists them; each sets up .venv first where it needs one.

PYTHON ?= python3
JOBS ?= 2
ARGS ?=

BIN := .venv/bin
READY := .venv/.ready
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
# all laws and every docstring's example; processes share the cores, so each works with one thread
SUITE := $(PYTEST) -n $(JOBS) --doctest-modules src/lowtide benchmarks/corpus.py benchmarks/record.py tests

.DEFAULT_GOAL := help
.PHONY: help demo check format test test-all netlab docs bench corpus clean

help: ## list the targets
	@echo "make TARGET [PYTHON=python3.12] [JOBS=2] [ARGS=...]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(READY): requirements/dev.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lowtide needs Python 3.11 or later: make PYTHON=python3.11")'
	@echo "setting up .venv, which takes a minute or more the first time"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements/dev.lock
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: $(READY) ## train a small model on four processes and show losses and bytes
	@$(BIN)/python examples/demo.py $(ARGS)

check: $(READY) ## format, lint, strict types, architecture, budget, exports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict src
	$(PYTEST) tests/test_architecture.py tests/test_budget.py tests/test_exports.py

format: $(READY) ## format all files and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: $(READY) ## tests and doctests on the CPU, a few real processes among them
	$(SUITE) -m "not slow and not netlab" $(ARGS)

test-all: $(READY) ## every test, the slow ones too
	$(SUITE) $(ARGS)

netlab: $(READY) ## tests in network namespaces (root, iproute2)
	$(PYTEST) -m netlab tests $(ARGS)

docs: $(READY) ## run the examples of every page and docstring, follow every link
	$(PYTEST) --doctest-modules src/lowtide tests/test_docs.py

bench: $(READY) ## run benchmarks/NAME: make bench NAME=codec [ARGS=...]
	@test -f "benchmarks/$(NAME)/run.py" || { echo "give NAME, one of:" $$(cd benchmarks && ls -d */ | tr -d /); exit 2; }
	$(BIN)/python benchmarks/$(NAME)/run.py $(ARGS)

corpus: ## make the large text of the studies in data/ (Debian's apt-get, 139 MB)
	$(PYTHON) benchmarks/corpus.py $(ARGS)

clean: ## remove the environment, caches and builds; data/ stays
	rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
