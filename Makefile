# Every target first makes .venv, so a fresh machine needs only python3, venv and make.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
NAME ?=
ARGS ?=
# Test files that run side by side; JOBS=0 for a debugger.
JOBS ?= 2

# The package as a wheel has it, with compiled modules, made anew whenever a source has
# changed. Processes that it starts must not find the sources first either.
COMPILED := $(CURDIR)/build/compiled
SOURCES := $(shell find timelyml -name '*.py')
WITH_COMPILED := PYTHONSAFEPATH=1 PYTHONPATH="$(COMPILED):$(CURDIR)" $(PY)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Else each of the hundreds of processes that tests start compiles all sources anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run test test-slow test-compiled check format bench bench-sources clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "timelyml needs Python 3.11 or later; got " + sys.version.split()[0] + "; use make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -qq --editable '.[dev,plot]'
	@touch $@

$(COMPILED)/.ready: $(READY) hatch_build.py $(SOURCES)
	rm -rf $(COMPILED)
	TIMELYML_COMPILE=1 $(PY) -m pip install -qq --no-deps --target $(COMPILED) . && touch $@ || echo "no wheel could be built: the sources are measured"

run: $(READY) ## train the mixture-of-experts example (ARGS='--steps 50 --workers 4')
	$(PY) -m examples.moe_routing $(ARGS)

test: $(READY) ## run the tests and doctests (ARGS='tests/progress -x')
	$(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(READY) ## run the slow tests: thousands of simulated schedules
	$(PY) -m pytest -m slow --timeout=3600 $(ARGS)

test-compiled: $(COMPILED)/.ready ## run the tests of the runtime and the controller on compiled modules
	@$(WITH_COMPILED) -c 'import sys; from timelyml.progress import tracker; sys.exit(tracker.__file__.endswith(".py") and "timelyml was not compiled")'
	$(WITH_COMPILED) -m pytest -o pythonpath= -m 'not slow and not sources' $(or $(ARGS),tests/progress tests/exchange tests/runtime tests/simulation tests/operators tests/ml/controller tests/ml/hosts tests/ml/scheduling tests/ml/store)

check: $(READY) ## formatting, lint, types, examples at a small size, tests
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m examples.moe_routing --small --verify
	$(PY) -m examples.pipeline --small --verify
	$(PY) -m examples.shared_layers --small --verify
	$(PY) -m examples.two_islands --small --verify
	$(PY) -m examples.graph_algorithms --vertices 300 --edges 900
	$(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

format: $(READY) ## format the code and mend what ruff can mend
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: $(COMPILED)/.ready ## run one benchmark (NAME=latency ARGS=--json); without NAME, list them
	$(WITH_COMPILED) -m benchmarks $(NAME) $(ARGS)

bench-sources: $(READY) ## run one benchmark on the sources, where nothing is compiled
	$(PY) -m benchmarks $(NAME) $(ARGS)

clean: ## remove what builds and runs leave behind, .venv included
	rm -rf $(VENV) build dist out .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
