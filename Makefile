# The commands of this project. Each installs what it needs into .venv first; that is quick the second time.
#
# Variables:
#   PYTHON        the Python 3.11, 3.12 or 3.13 that .venv is made from
#   TORCH         what pip installs first; "torch==2.13.0+cu130" and the like for a certain GPU build
#   TORCHVISION   the release of torchvision that is made for it
#   TESTED        the versions that pip installs, of Python 3.11, 3.12 or 3.13; empty for the newest that pyproject.toml
#                 allows, and for another release in TORCH
#   WORKERS       test processes of pytest-xdist, each of which may start up to 8 ranks; three keep two cores busy
#   PYTEST_ARGS   more arguments for pytest, as in: make test PYTEST_ARGS="-k layout"
#   MCORE_LATEST  the release of megatron-core that "make test-latest" runs the tests on
#   TE_RELEASE    the release of TransformerEngine that "make test-te" runs its tests on
#   LIGHTNING     a checkout of Lightning's repository, whose own tests "make test-lightning" runs
#   SOURCE        a checkout of TransformerEngine, whose own tests "make test-te-suite" runs
#   MIN_TESTS     fewer tests than this are a failure; not applied to a part chosen by PYTEST_ARGS
#                 (MIN_TE_TESTS, MIN_THOROUGH_TESTS and MIN_THOROUGH_TE_TESTS likewise for the other sets)
#   ARGS          arguments of the demo, the benchmark, Lightning's tests or the walk over random settings

VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

SUITABLE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for python in python3 python3.12 python3.11 python3.13; do \
	"$$python" -c '$(SUITABLE)' 2>/dev/null && echo "$$python" && break; done)
TORCH ?= torch==2.13.0
TORCHVISION ?= torchvision==0.28.0
TESTED ?= requirements/tested-$$($(RUN) -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt
WORKERS ?= 3
PYTEST_ARGS ?=
MCORE_LATEST ?= 0.19.2
TE_RELEASE ?= 2.11.0
MARK := not thorough
MIN_TESTS ?= $(if $(PYTEST_ARGS),0,6550)
MIN_TE_TESTS ?= $(if $(PYTEST_ARGS),0,200)
MIN_THOROUGH_TESTS ?= $(if $(PYTEST_ARGS),0,400)
MIN_THOROUGH_TE_TESTS ?= $(if $(PYTEST_ARGS),0,24)
ARGS ?=
LIGHTNING ?=
SOURCE ?=

.DEFAULT_GOAL := help
.PHONY: help install lock check docs format test test-fast test-thorough test-lightning test-ray test-oldest test-latest test-te test-te-suite fuzz demo demo-finetune demo-hf demo-lora demo-dpo demo-vl demo-fp8 bench bench-checkpoint \
	bench-generate bench-packing bench-preprocess bench-hf bench-lora bench-peers bench-preference bench-scale bench-startup bench-vision gpu torture faults mutate house clean

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-18s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(INSTALLED)  ## make .venv and install the package and its tools into it

# torch comes first: left to choose, pip may take a build of several gigabytes for another CUDA.
# The stamp is written last, so an installation that failed is tried again.
PIP := -m pip install --quiet $(if $(TESTED),--constraint "$(TESTED)")

$(INSTALLED): pyproject.toml Makefile $(wildcard requirements/tested-*.txt)
	@"$(PYTHON)" -c '$(SUITABLE)' 2>/dev/null || { \
		echo "PYTHON='$(PYTHON)' is not a Python 3.11, 3.12 or 3.13 with venv and pip;" \
			"install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	@$(RUN) -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VENV)
	$(RUN) $(PIP) "$(TORCH)" hatchling editables
	$(RUN) $(PIP) --no-build-isolation --editable ".[dev]"
	$(RUN) $(PIP) --no-deps "$(TORCHVISION)"
	$(RUN) -m tests.torchvision_on_cpu
	@touch $@

# uv resolves for a Python that is not here. What the CUDA builds of torch bring is left out: a build asks for its own.
LOCK := $(VENV)/lock
RESOLVE = $(LOCK)/bin/uv pip compile --quiet --upgrade --no-annotate --custom-compile-command "make lock" \
	--python-platform linux --extra dev pyproject.toml $(LOCK)/packages.txt

lock: $(INSTALLED)  ## write the versions that "make install" and "make test-oldest" install
	$(RUN) -m venv --clear $(LOCK)
	$(LOCK)/bin/python -m pip install --quiet "uv>=0.13,<0.14"
	printf '%s\n' "$(TORCH)" "$(TORCHVISION)" hatchling editables > $(LOCK)/packages.txt
	for python in 3.11 3.12 3.13; do $(RESOLVE) tests/lightning_suite/requirements.txt \
		--python-version $$python --output-file requirements/tested-$$python.txt || exit 1; done
	printf '%s\n' "torchvision>=0.20" "hatchling>=1.26" "editables>=0.5" > $(LOCK)/packages.txt
	$(RESOLVE) --resolution lowest-direct --python-version 3.11 --output-file requirements/oldest-3.11.txt
	sed -i -E '/^(nvidia|cuda)-/d' requirements/*.txt

check: $(INSTALLED) docs  ## lint, formatting, types, wording and documentation
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports --no-logo --cache-dir build/import-linter
	$(RUN) -m tests.wording

docs: $(INSTALLED)  ## build the documentation into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet --strict

format: $(INSTALLED)  ## fix what the linter can fix, and format
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

test: $(INSTALLED)  ## run the tests: each claim of the project, once
	MIN_TESTS=$(MIN_TESTS) $(RUN) -m pytest --numprocesses $(WORKERS) --dist loadgroup -m "$(MARK)" $(PYTEST_ARGS)
	$(if $(PYTEST_ARGS),,@$(MAKE) --no-print-directory test-te MARK="$(MARK)" MIN_TE_TESTS=$(MIN_TE_TESTS))

test-thorough:  ## run the tests that make test leaves out: the same claims on more layouts, models and settings
	@$(MAKE) --no-print-directory test MARK=thorough MIN_TESTS=$(MIN_THOROUGH_TESTS) MIN_TE_TESTS=$(MIN_THOROUGH_TE_TESTS)

test-fast: $(INSTALLED)  ## run the quick tests of one process, before each commit
	$(RUN) -m pytest --numprocesses $(WORKERS) --dist loadgroup \
		-m "not slow and not distributed and not thorough" $(PYTEST_ARGS) tests/unit

# The oldest releases that pyproject.toml allows, torch among them: on most machines a CUDA build of some gigabytes.
OLDEST := .venv-oldest

$(OLDEST)/.installed: pyproject.toml requirements/oldest-3.11.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
		echo "PYTHON='$(PYTHON)' is not Python 3.11, for which requirements/oldest-3.11.txt is made;" \
			"name one: make test-oldest PYTHON=/path/to/python3.11" >&2; exit 1; }
	"$(PYTHON)" -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --requirement requirements/oldest-3.11.txt
	$(OLDEST)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(OLDEST)/bin/python -m tests.torchvision_on_cpu
	@touch $@

test-oldest: $(OLDEST)/.installed  ## run all tests on the oldest packages that pyproject.toml allows
	MIN_TESTS=$(MIN_TESTS) $(OLDEST)/bin/python -m pytest --numprocesses $(WORKERS) --dist loadgroup $(PYTEST_ARGS)

# Python 3.11 installs megatron-core 0.16.1; later releases ask for 3.12, yet all that is used of them runs on 3.11.
# So their wheel is unpacked beside .venv and comes first on the path, and its one compiled file is made for this Python.
LATEST := .mcore-$(MCORE_LATEST)

define BUILD_HELPERS
import subprocess, sys, sysconfig, torch.utils.cpp_extension as extension; \
paths = [*extension.include_paths(), sysconfig.get_paths()["include"]]; \
source = sys.argv[1] + ".cpp"; built = sys.argv[1] + "_cpp" + sysconfig.get_config_var("EXT_SUFFIX"); \
flags = ["-O2", "-shared", "-std=c++17", "-fPIC", *("-I" + path for path in paths)]; \
sys.exit(subprocess.call(["g++", *flags, source, "-o", built]))
endef

$(LATEST)/.unpacked: $(INSTALLED)
	rm -rf $(LATEST)
	$(RUN) -m pip download --quiet --no-deps --dest $(LATEST)/wheels --only-binary=:all: --python-version 3.12 \
		--platform manylinux_2_28_$$(uname -m) --platform manylinux_2_24_$$(uname -m) megatron-core==$(MCORE_LATEST)
	$(RUN) -m pip download --quiet --no-deps --dest $(LATEST)/wheels --only-binary=:all: triton
	for wheel in $(LATEST)/wheels/*.whl; do $(RUN) -m zipfile -e "$$wheel" $(LATEST)/site; done
	rm -r $(LATEST)/wheels
	$(RUN) -c '$(BUILD_HELPERS)' $(LATEST)/site/megatron/core/datasets/helpers
	@touch $@

# Whatever was released since "make lock"; torch stays, unless TORCH=torch asks for the newest, which may be a CUDA build.
NEWEST := .venv-latest

test-latest: $(LATEST)/.unpacked  ## run all tests on the newest packages that pyproject.toml allows, megatron-core too
	@$(NEWEST)/bin/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet "$(TORCH)"
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager "$(TORCH)" --editable ".[dev]"
	$(NEWEST)/bin/python -m pip install --quiet --no-deps "$(TORCHVISION)"
	$(NEWEST)/bin/python -m tests.torchvision_on_cpu
	PYTHONPATH=$(CURDIR)/$(LATEST)/site MEGATRON_CORE_VERSION=$(MCORE_LATEST) MIN_TESTS=$(MIN_TESTS) \
		$(NEWEST)/bin/python -m pytest --numprocesses $(WORKERS) --dist loadgroup $(PYTEST_ARGS)

# TransformerEngine's Python code alone, without the CUDA library, is not installed into .venv but unpacked beside it: all
# other tests run without it.
TE := .te-$(TE_RELEASE)

$(TE)/.unpacked: $(INSTALLED)
	rm -rf $(TE)
	$(RUN) -m pip download --quiet --no-deps --dest $(TE)/wheels --only-binary=:all: transformer-engine==$(TE_RELEASE)
	$(RUN) -m zipfile -e $(TE)/wheels/*.whl $(TE)/site
	rm -r $(TE)/wheels
	@touch $@

test-te: $(TE)/.unpacked  ## run the tests of TransformerEngine on the CPU
	PYTHONPATH=$(CURDIR)/$(TE)/site MIN_TESTS=$(MIN_TE_TESTS) \
		$(RUN) -m pytest --numprocesses $(WORKERS) --dist loadgroup -m "$(MARK)" $(PYTEST_ARGS) tests/te

test-te-suite: $(TE)/.unpacked  ## run TransformerEngine's own tests as they are, on the CPU
	@test -d "$(SOURCE)/tests/pytorch" || { \
		echo "SOURCE='$(SOURCE)' is not a checkout of TransformerEngine; get one with: git clone --depth 1 --branch v2.11" \
			"https://github.com/NVIDIA/TransformerEngine, and name it: make test-te-suite SOURCE=/path/to/TransformerEngine" \
			>&2; exit 1; }
	PYTHONPATH=$(CURDIR):$(CURDIR)/$(TE)/site $(RUN) -m tests.te_suite --source "$(SOURCE)" $(ARGS)

test-ray: $(INSTALLED)  ## run the tests that start Ray, about 7 minutes
	TEST_RAY=1 $(RUN) -m pytest $(PYTEST_ARGS) tests/on_ray

# Lightning's tests import packages of their own. They go into an environment that borrows all the rest from .venv, so
# that our own tests run without them.
SUITE := $(VENV)/lightning-suite
BORROWED := import sysconfig; print(sysconfig.get_paths()["purelib"])

$(SUITE)/.installed: $(INSTALLED) tests/lightning_suite/requirements.txt
	$(RUN) -m venv --clear $(SUITE)
	{ echo "$(CURDIR)"; $(RUN) -c '$(BORROWED)'; } > "$$($(SUITE)/bin/python -c '$(BORROWED)')/borrowed.pth"
	$(SUITE)/bin/python $(PIP) --requirement tests/lightning_suite/requirements.txt
	@touch $@

test-lightning:  ## run Lightning's own tests as they are, with ddp and with this strategy, and compare
	@test -d "$(LIGHTNING)/tests/tests_pytorch" || { \
		echo "LIGHTNING='$(LIGHTNING)' is no checkout of Lightning with its tests; get one with: git clone --depth 1" \
			"--branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning, and name it:" \
			"make test-lightning LIGHTNING=/path/to/pytorch-lightning" >&2; exit 1; }
	@$(MAKE) --no-print-directory $(SUITE)/.installed
	$(SUITE)/bin/python -m tests.lightning_suite --source "$(LIGHTNING)" $(ARGS)

fuzz: $(INSTALLED)  ## validate thousands of random settings; train, interrupt and resume a sample of them
	$(RUN) -m tests.fuzz $(ARGS)

demo: $(INSTALLED)  ## train a small GPT on four CPU ranks, tensor and pipeline parallel
	$(RUN) examples/pretrain_gpt.py $(ARGS)

demo-finetune: $(INSTALLED)  ## fine-tune a small GPT on packed conversations, tensor and context parallel
	$(RUN) examples/finetune_gpt.py $(ARGS)

demo-hf: $(INSTALLED)  ## fine-tune a Hugging Face model, tensor parallel, and hand back a Hugging Face model
	$(RUN) examples/finetune_hf.py $(ARGS)

demo-lora: $(INSTALLED)  ## train LoRA adapters on a frozen model, tensor parallel, and write a PEFT folder
	$(RUN) examples/finetune_lora.py $(ARGS)

demo-dpo: $(INSTALLED)  ## let a tiny model learn to prefer one of two answers by DPO, tensor parallel
	$(RUN) examples/prefer_answers.py $(ARGS)

demo-vl: $(INSTALLED)  ## let a tiny vision-language model learn to say which shapes it sees, tensor parallel
	$(RUN) examples/describe_shapes.py $(ARGS)

demo-fp8: $(TE)/.unpacked  ## train a small GPT in bf16 and with each FP8 recipe, and compare
	PYTHONPATH=$(CURDIR)/$(TE)/site $(RUN) examples/preview_fp8.py $(ARGS)

bench: $(INSTALLED)  ## time our step against a bare Megatron loop
	$(RUN) -m benchmarks.overhead $(ARGS)

bench-checkpoint: $(INSTALLED)  ## time saves and loads against plain copies
	$(RUN) -m benchmarks.checkpoint $(ARGS)

bench-packing: $(INSTALLED)  ## fill rows, pack a million samples, train packed against padded
	$(RUN) -m benchmarks.packing $(ARGS)

bench-preprocess: $(INSTALLED)  ## time `lightning-mcore preprocess` against the tokenizer alone
	$(RUN) -m benchmarks.preprocess $(ARGS)

bench-generate: $(INSTALLED)  ## time generation with and without a cache beside transformers
	$(RUN) -m benchmarks.generate $(ARGS)

bench-hf: $(INSTALLED)  ## time Hugging Face models in and out against a copy
	$(RUN) -m benchmarks.hf $(ARGS)

bench-lora: $(INSTALLED)  ## time adapters beside full training and beside peft
	$(RUN) -m benchmarks.lora $(ARGS)

bench-peers: $(INSTALLED)  ## time a step beside Lightning's DDP and FSDP2, transformers' Trainer and bare Megatron
	$(RUN) -m benchmarks.peers $(ARGS)

bench-preference: $(INSTALLED)  ## time a step of DPO beside trl (if installed), and its memory beside whole logits
	$(RUN) -m benchmarks.preference $(ARGS)

bench-scale: $(INSTALLED)  ## count what grows with the number of ranks: collectives, files, bytes
	$(RUN) -m benchmarks.scale $(ARGS)

bench-startup: $(INSTALLED)  ## time the import, `lightning-mcore --help` and `plan`
	$(RUN) -m benchmarks.startup $(ARGS)

bench-vision: $(INSTALLED)  ## time and memory of a vision tower: trained, frozen, images shared out
	$(RUN) -m benchmarks.vision $(ARGS)

gpu: $(INSTALLED)  ## run everything that needs a GPU, tests and measurements, in pieces that are not run twice
	$(RUN) -m tests.gpu $(ARGS)

torture: $(INSTALLED)  ## kill ranks at random moments of saves, 500 times
	$(RUN) -m benchmarks.checkpoint_torture $(ARGS)

mutate: $(INSTALLED)  ## damage the files that a run reads, 500 times each
	$(RUN) -m tests.mutations $(ARGS)

faults: $(INSTALLED)  ## let a hundred trainings fail, each in its way, and see that all ranks end
	$(RUN) -m tests.faults $(ARGS)

house: $(INSTALLED)  ## report lines by room, density of comments and docstrings, the longest files and functions
	$(RUN) -m tests.house

clean:  ## remove caches, build products and what runs wrote; environments stay
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache lightning_logs checkpoints outputs
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +
