# The commands of this project. Each installs what it needs into .venv first; that is quick the second time.
#
# Variables:
#   PYTHON        the Python 3.11, 3.12 or 3.13 that .venv is made from
#   TORCH         what pip installs first; "torch==2.13.0+cu130" and the like for a certain GPU build
#   WORKERS       test processes of pytest-xdist; each test may start up to 8 ranks of its own
#   PYTEST_ARGS   more arguments for pytest, as in: make test PYTEST_ARGS="-k layout"
#   MIN_TESTS     fewer tests than this are a failure; not applied to a part chosen by PYTEST_ARGS
#   ARGS          arguments of the demo or the benchmark

VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

SUITABLE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for python in python3 python3.12 python3.11 python3.13; do \
	"$$python" -c '$(SUITABLE)' 2>/dev/null && echo "$$python" && break; done)
TORCH ?= torch==2.13.0
WORKERS ?= 2
PYTEST_ARGS ?=
MIN_TESTS ?= $(if $(PYTEST_ARGS),0,950)
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install check format test demo bench clean

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(INSTALLED)  ## make .venv and install the package and its tools into it

# torch comes first and pinned: left to choose, pip may take a build of several gigabytes for another CUDA.
# The stamp is written last, so an installation that failed is tried again.
$(INSTALLED): pyproject.toml Makefile
	@"$(PYTHON)" -c '$(SUITABLE)' 2>/dev/null || { \
		echo "PYTHON='$(PYTHON)' is not a Python 3.11, 3.12 or 3.13 with venv and pip;" \
			"install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	@$(RUN) -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VENV)
	$(RUN) -m pip install --quiet "$(TORCH)"
	$(RUN) -m pip install --quiet --editable ".[dev]"
	@touch $@

check: $(INSTALLED)  ## lint, formatting and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(INSTALLED)  ## mend what the linter can mend, and format
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

test: $(INSTALLED)  ## run all tests
	MIN_TESTS=$(MIN_TESTS) $(RUN) -m pytest --numprocesses $(WORKERS) $(PYTEST_ARGS)

demo: $(INSTALLED)  ## train a small GPT on four CPU ranks, tensor and pipeline parallel
	$(RUN) examples/pretrain_gpt.py $(ARGS)

bench: $(INSTALLED)  ## time our step against a bare Megatron loop
	$(RUN) -m benchmarks.overhead $(ARGS)

clean:  ## remove caches, build products and what runs wrote; .venv stays
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache lightning_logs checkpoints outputs
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
