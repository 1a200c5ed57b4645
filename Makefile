# The commands of this project. Each first installs what it needs into .venv; that takes time only once.
#
# Variables:
#   PYTHON        the Python 3.11, 3.12 or 3.13 that creates .venv
#   TORCH         the torch that pip installs first; for a GPU build, for example "torch==2.13.0+cu130"
#   TORCHVISION   the torchvision release that matches TORCH
#   TESTED        the file of pinned versions for the Python in .venv; set it to nothing for the newest versions that
#                 pyproject.toml allows, or if you change TORCH
#   WORKERS       number of pytest-xdist processes, each of which may start up to 8 ranks; three keep two cores busy
#   PYTEST_ARGS   extra arguments for pytest, as in: make test PYTEST_ARGS="-k layout"
#   MCORE_LATEST  the megatron-core release that "make test-latest" uses
#   TE_RELEASE    the TransformerEngine release that "make test-te" uses
#   LIGHTNING     a checkout of Lightning's repository; "make test-lightning" runs Lightning's own tests
#   SOURCE        a checkout of TransformerEngine, whose own tests "make test-te-suite" runs, or of Megatron-LM, on which
#                 "make test-mcore-source" runs our tests
#   MIN_TESTS     a run of fewer tests fails; not checked if PYTEST_ARGS is set
#                 (MIN_TE_TESTS, MIN_THOROUGH_TESTS and MIN_THOROUGH_TE_TESTS likewise for the other sets)
#   ARGS          arguments for a demo, a benchmark, Lightning's tests or the tests with random settings

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
MIN_TESTS ?= $(if $(PYTEST_ARGS),0,7800)
MIN_TE_TESTS ?= $(if $(PYTEST_ARGS),0,200)
MIN_THOROUGH_TESTS ?= $(if $(PYTEST_ARGS),0,630)
MIN_THOROUGH_TE_TESTS ?= $(if $(PYTEST_ARGS),0,24)
ARGS ?=
LIGHTNING ?=
SOURCE ?=

# Dozens of processes import the same files, so Python keeps what it has compiled, as it does by default.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install lock check dist docs docs-release site-check format test test-fast test-thorough test-lightning test-ecosystem test-ray test-oldest test-latest test-mcore-source releases test-te test-te-suite sentences fuzz demo demo-finetune demo-hf demo-lora demo-dpo demo-distill demo-vl demo-fp8 bench bench-checkpoint \
	bench-generate bench-packing bench-preprocess bench-hf bench-lora bench-peers bench-preference bench-rehearse bench-scale bench-startup bench-vision plots gpu torture faults mutate house clean

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-18s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(INSTALLED)  ## create .venv, and install the package and its tools

# torch comes first: left to itself, pip may choose a build of several gigabytes for another CUDA version.
# The stamp is written last, so a failed installation is tried again.
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

# uv can resolve for a Python that is not installed. CUDA packages are removed: each torch build requires its own.
LOCK := $(VENV)/lock
RESOLVE = $(LOCK)/bin/uv pip compile --quiet --upgrade --no-annotate --custom-compile-command "make lock" \
	--python-platform linux --extra dev pyproject.toml $(LOCK)/packages.txt

lock: $(INSTALLED)  ## update the pinned versions that "make install" and "make test-oldest" install
	$(RUN) -m venv --clear $(LOCK)
	$(LOCK)/bin/python -m pip install --quiet "uv>=0.13,<0.14"
	printf '%s\n' "$(TORCH)" "$(TORCHVISION)" hatchling editables > $(LOCK)/packages.txt
	for python in 3.11 3.12 3.13; do $(RESOLVE) tests/lightning_suite/requirements.txt \
		--python-version $$python --output-file requirements/tested-$$python.txt || exit 1; done
	printf '%s\n' "torchvision>=0.20" "hatchling>=1.26" "editables>=0.5" > $(LOCK)/packages.txt
	$(RESOLVE) --resolution lowest-direct --python-version 3.11 --output-file requirements/oldest-3.11.txt
	sed -i -E '/^(nvidia|cuda)-/d' requirements/*.txt

check: $(INSTALLED) docs  ## check lint, formatting, types, import order, wording and documentation
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports --no-logo --cache-dir build/import-linter
	$(RUN) -m tests.wording

# The wheel is built from the sdist, which proves that the sdist is complete, and then read by a Python that has only our
# dependencies. HEAD may have no tag, but no other one than the version's.
DIST := build/dist
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

dist: $(INSTALLED)  ## build and check the packages of a release in dist/, with their dependencies (SBOM) and provenance
	@tag=$$(git describe --tags --exact-match 2>/dev/null || true); \
		if [ -n "$$tag" ] && [ "$$tag" != "v$(VERSION)" ]; then \
		echo "HEAD has the tag $$tag, but pyproject.toml has the version $(VERSION); change one of them" >&2; exit 1; fi
	rm -rf dist $(DIST)
	"$(PYTHON)" -m venv $(DIST)
	$(DIST)/bin/python -m pip install --quiet build twine check-wheel-contents cyclonedx-bom
	PIP_CONSTRAINT="$(CURDIR)/$(TESTED)" $(DIST)/bin/python -m build --outdir dist .
	$(DIST)/bin/twine check --strict dist/*
	$(DIST)/bin/check-wheel-contents dist/*.whl
	$(RUN) -m pip install --quiet --no-deps --target $(DIST)/site dist/*.whl
	cd $(DIST) && PYTHONPATH=site ../../$(RUN) -c 'import lightning_mcore as ours; assert "$(DIST)/site" in ours.__file__; print(ours.__file__)'
	cd $(DIST) && PYTHONPATH=site ../../$(RUN) -m lightning_mcore.cli plan --help > /dev/null
	$(DIST)/bin/cyclonedx-py environment --output-file dist/lightning_mcore-$(VERSION).cdx.json $(VENV)
	$(DIST)/bin/python tests/provenance.py dist --pins "$(TESTED)" --out dist/lightning_mcore-$(VERSION).provenance.json

docs: $(INSTALLED)  ## build the documentation into build/site; broken links are errors
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet --strict

docs-release: $(INSTALLED)  ## add this version's documentation to the branch gh-pages, beside those of earlier versions
	$(RUN) -m pip install --quiet --upgrade --target $(DIST)/mike mike
	PYTHONPATH=$(DIST)/mike PATH="$(abspath $(VENV))/bin:$$PATH" NO_MKDOCS_2_WARNING=1 $(DIST)/mike/bin/mike deploy --quiet --update-aliases $(VERSION) latest
	PYTHONPATH=$(DIST)/mike $(DIST)/mike/bin/mike set-default latest

site-check: $(INSTALLED)  ## open every page of the documentation in Chromium: widths, links, search, copy buttons
	$(RUN) -m tests.site $(ARGS)

format: $(INSTALLED)  ## fix what the linter can fix, and format the code
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

test: $(INSTALLED)  ## run the tests: every claim of the project, once
	MIN_TESTS=$(MIN_TESTS) $(RUN) -m pytest --numprocesses $(WORKERS) --dist loadgroup -m "$(MARK)" $(PYTEST_ARGS)
	$(if $(PYTEST_ARGS),,@$(MAKE) --no-print-directory test-te MARK="$(MARK)" MIN_TE_TESTS=$(MIN_TE_TESTS))

test-thorough:  ## run the tests that make test skips: the same claims on more layouts, models and settings
	@$(MAKE) --no-print-directory test MARK=thorough MIN_TESTS=$(MIN_THOROUGH_TESTS) MIN_TE_TESTS=$(MIN_THOROUGH_TE_TESTS)

test-fast: $(INSTALLED)  ## run the quick single-process tests, before each commit
	$(RUN) -m pytest --numprocesses $(WORKERS) --dist loadgroup \
		-m "not slow and not distributed and not thorough" $(PYTEST_ARGS) tests/unit

sentences: $(INSTALLED)  ## write tests/sentences.txt: what tests make the package say; PYTEST_ARGS may name files
	UPDATE_SENTENCES=1 $(RUN) -m pytest --numprocesses $(WORKERS) --dist loadgroup -q \
		$(or $(PYTEST_ARGS),$$(grep -rl "support.sentences import" tests --include="test_*.py"))

# The oldest releases that pyproject.toml allows, including torch: on most machines, a CUDA build of several gigabytes.
OLDEST := .venv-oldest

$(OLDEST)/.installed: pyproject.toml requirements/oldest-3.11.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
		echo "PYTHON='$(PYTHON)' is not Python 3.11, which requirements/oldest-3.11.txt needs;" \
			"name one: make test-oldest PYTHON=/path/to/python3.11" >&2; exit 1; }
	"$(PYTHON)" -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --requirement requirements/oldest-3.11.txt
	$(OLDEST)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(OLDEST)/bin/python -m tests.torchvision_on_cpu
	@touch $@

test-oldest: $(OLDEST)/.installed  ## run all tests on the oldest packages that pyproject.toml allows
	MIN_TESTS=$(MIN_TESTS) $(OLDEST)/bin/python -m pytest --numprocesses $(WORKERS) --dist loadgroup $(PYTEST_ARGS)

# Python 3.11 installs megatron-core 0.16.1; later releases require 3.12, but everything used here runs on 3.11. So their
# wheel is unpacked next to .venv and comes first on the path, and its only compiled file is built for this Python.
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

# Everything released since "make lock". torch stays the same unless you set TORCH=torch for the newest, which may be a
# CUDA build.
NEWEST := .venv-latest

test-latest: $(LATEST)/.unpacked  ## run all tests on the newest packages that pyproject.toml allows, including megatron-core
	@$(NEWEST)/bin/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet "$(TORCH)"
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager "$(TORCH)" --editable ".[dev]"
	$(NEWEST)/bin/python -m pip install --quiet --no-deps "$(TORCHVISION)"
	$(NEWEST)/bin/python -m tests.torchvision_on_cpu
	PYTHONPATH=$(CURDIR)/$(LATEST)/site MEGATRON_CORE_VERSION=$(MCORE_LATEST) MIN_TESTS=$(MIN_TESTS) \
		$(NEWEST)/bin/python -m pytest --numprocesses $(WORKERS) --dist loadgroup $(PYTEST_ARGS)

# A copy of the checkout's megatron.core comes first on the path, so that the checkout stays as it is and the bound in
# pyproject.toml does not apply. Its metadata says its version; megatron-core reads triton, which this Python may lack.
CHECKOUT := .mcore-source
CORE = $(CHECKOUT)/site/megatron/core
define ADD_METADATA
import pathlib, runpy, sys; \
version = runpy.run_path(sys.argv[1] + "/megatron/core/package_info.py")["__shortversion__"]; \
folder = pathlib.Path(sys.argv[1], f"megatron_core-{version}.dist-info"); folder.mkdir(); \
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {version}\n")
endef

.PHONY: $(CHECKOUT)
$(CHECKOUT): $(INSTALLED)
	@test -f "$(SOURCE)/megatron/core/package_info.py" || { \
		echo "SOURCE='$(SOURCE)' is not a checkout of Megatron-LM; get one with: git clone --depth 1" \
			"https://github.com/NVIDIA/Megatron-LM, and name it: make $(MAKECMDGOALS) SOURCE=/path/to/Megatron-LM" \
			>&2; exit 1; }
	rm -rf $(CHECKOUT)
	mkdir -p $(CHECKOUT)/site/megatron
	cp -R "$(SOURCE)/megatron/core" $(CORE)
	NO_VCS_VERSION=1 $(RUN) -c '$(ADD_METADATA)' $(CHECKOUT)/site
	$(RUN) -m pip download --quiet --no-deps --dest $(CHECKOUT)/wheels --only-binary=:all: triton
	for wheel in $(CHECKOUT)/wheels/*.whl; do $(RUN) -m zipfile -e "$$wheel" $(CHECKOUT)/site; done
	rm -r $(CHECKOUT)/wheels
	$(RUN) -c '$(BUILD_HELPERS)' $(CORE)/datasets/helpers

test-mcore-source: $(CHECKOUT)  ## run our tests on a checkout of Megatron-LM, newer than the releases we support
	PYTHONPATH=$(CURDIR)/$(CHECKOUT)/site MIN_TESTS=$(MIN_TESTS) \
		$(RUN) -m pytest --numprocesses $(WORKERS) --dist loadgroup -m "$(MARK)" $(PYTEST_ARGS)

releases: $(LATEST)/.unpacked $(if $(SOURCE),$(CHECKOUT))  ## run tests on 0.16.1, 0.19.2 and a checkout; update the table
	$(RUN) -m tests.releases --latest $(LATEST) $(if $(SOURCE),--source "$(SOURCE)" --checkout $(CHECKOUT)) $(ARGS)

# Only TransformerEngine's Python code, without the CUDA library. It is unpacked next to .venv instead of installed into
# it, because all other tests run without it.
TE := .te-$(TE_RELEASE)

$(TE)/.unpacked: $(INSTALLED)
	rm -rf $(TE)
	$(RUN) -m pip download --quiet --no-deps --dest $(TE)/wheels --only-binary=:all: transformer-engine==$(TE_RELEASE)
	$(RUN) -m zipfile -e $(TE)/wheels/*.whl $(TE)/site
	rm -r $(TE)/wheels
	@touch $@

test-te: $(TE)/.unpacked  ## run our tests of TransformerEngine on the CPU
	PYTHONPATH=$(CURDIR)/$(TE)/site MIN_TESTS=$(MIN_TE_TESTS) \
		$(RUN) -m pytest --numprocesses $(WORKERS) --dist loadgroup -m "$(MARK)" $(PYTEST_ARGS) tests/te

test-te-suite: $(TE)/.unpacked  ## run TransformerEngine's own tests, unchanged, on the CPU
	@test -d "$(SOURCE)/tests/pytorch" || { \
		echo "SOURCE='$(SOURCE)' is not a checkout of TransformerEngine; get one with: git clone --depth 1 --branch v2.11" \
			"https://github.com/NVIDIA/TransformerEngine, and name it: make test-te-suite SOURCE=/path/to/TransformerEngine" \
			>&2; exit 1; }
	PYTHONPATH=$(CURDIR):$(CURDIR)/$(TE)/site $(RUN) -m tests.te_suite --source "$(SOURCE)" $(ARGS)

test-ray: $(INSTALLED)  ## run the tests that start Ray, about 7 minutes
	TEST_RAY=1 $(RUN) -m pytest $(PYTEST_ARGS) tests/on_ray

# Lightning's tests import packages of their own. These go into an environment that borrows everything else from .venv,
# so that our own tests run without them.
SUITE := $(VENV)/lightning-suite
BORROWED := import sysconfig; print(sysconfig.get_paths()["purelib"])

$(SUITE)/.installed: $(INSTALLED) tests/lightning_suite/requirements.txt
	$(RUN) -m venv --clear $(SUITE)
	{ echo "$(CURDIR)"; $(RUN) -c '$(BORROWED)'; } > "$$($(SUITE)/bin/python -c '$(BORROWED)')/borrowed.pth"
	$(SUITE)/bin/python $(PIP) --requirement tests/lightning_suite/requirements.txt
	@touch $@

ECOSYSTEM := $(VENV)/ecosystem

$(ECOSYSTEM)/.installed: $(INSTALLED) tests/ecosystem/requirements.txt
	$(RUN) -m venv --clear $(ECOSYSTEM)
	{ echo "$(CURDIR)"; $(RUN) -c '$(BORROWED)'; } > "$$($(ECOSYSTEM)/bin/python -c '$(BORROWED)')/borrowed.pth"
	$(ECOSYSTEM)/bin/python $(PIP) --requirement tests/ecosystem/requirements.txt
	$(ECOSYSTEM)/bin/python -m pip install --quiet "megatron-energon>=7.4,<8"  # requires an older python-dateutil than .venv has
	@touch $@

test-ecosystem: $(ECOSYSTEM)/.installed  ## run packages that users combine with this one, and update the page of them
	TEST_ECOSYSTEM=1 $(if $(PYTEST_ARGS),,WRITE_WORKS_WITH=1) TRITON_INTERPRET=1 $(ECOSYSTEM)/bin/python -m pytest --numprocesses 2 $(PYTEST_ARGS) tests/ecosystem

test-lightning:  ## run Lightning's own tests, unchanged, with ddp and with this strategy, and compare
	@test -d "$(LIGHTNING)/tests/tests_pytorch" || { \
		echo "LIGHTNING='$(LIGHTNING)' is not a checkout of Lightning with its tests; get one with: git clone --depth 1" \
			"--branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning, and name it:" \
			"make test-lightning LIGHTNING=/path/to/pytorch-lightning" >&2; exit 1; }
	@$(MAKE) --no-print-directory $(SUITE)/.installed
	$(SUITE)/bin/python -m tests.lightning_suite --source "$(LIGHTNING)" $(ARGS)

fuzz: $(INSTALLED)  ## check thousands of random settings; train, interrupt and resume some of them
	$(RUN) -m tests.fuzz $(ARGS)

demo: $(INSTALLED)  ## train a small GPT on four CPU ranks, with tensor and pipeline parallelism
	$(RUN) examples/pretrain_gpt.py $(ARGS)

demo-finetune: $(INSTALLED)  ## fine-tune a small GPT on packed conversations, with tensor and context parallelism
	$(RUN) examples/finetune_gpt.py $(ARGS)

demo-hf: $(INSTALLED)  ## fine-tune a Hugging Face model with tensor parallelism, and export it for Hugging Face
	$(RUN) examples/finetune_hf.py $(ARGS)

demo-lora: $(INSTALLED)  ## train LoRA adapters on a frozen model with tensor parallelism, and write a PEFT folder
	$(RUN) examples/finetune_lora.py $(ARGS)

demo-distill: $(INSTALLED)  ## train a small model with and without a larger one as its teacher, and compare them
	$(RUN) examples/distill_gpt.py $(ARGS)
demo-dpo: $(INSTALLED)  ## train a tiny model with DPO and tensor parallelism to prefer one of two answers
	$(RUN) examples/prefer_answers.py $(ARGS)

demo-vl: $(INSTALLED)  ## train a tiny vision-language model with tensor parallelism to name the shapes it sees
	$(RUN) examples/describe_shapes.py $(ARGS)

demo-fp8: $(TE)/.unpacked  ## train a small GPT in bf16 and with each FP8 recipe, and compare
	PYTHONPATH=$(CURDIR)/$(TE)/site $(RUN) examples/preview_fp8.py $(ARGS)

bench: $(INSTALLED)  ## compare our step time with a bare Megatron loop
	$(RUN) -m benchmarks.overhead $(ARGS)

bench-checkpoint: $(INSTALLED)  ## compare the time of saves and loads with plain copies
	$(RUN) -m benchmarks.checkpoint $(ARGS)

bench-packing: $(INSTALLED)  ## measure packing: fill rows, pack a million samples, compare training on packed and padded rows
	$(RUN) -m benchmarks.packing $(ARGS)

bench-preprocess: $(INSTALLED)  ## compare the time of `lightning-mcore preprocess` with the tokenizer alone
	$(RUN) -m benchmarks.preprocess $(ARGS)

bench-generate: $(INSTALLED)  ## compare generation, with and without a cache, with transformers
	$(RUN) -m benchmarks.generate $(ARGS)

bench-hf: $(INSTALLED)  ## compare the time of Hugging Face import and export with a plain copy
	$(RUN) -m benchmarks.hf $(ARGS)

bench-lora: $(INSTALLED)  ## compare adapter training with full training and with PEFT
	$(RUN) -m benchmarks.lora $(ARGS)

bench-peers: $(INSTALLED)  ## compare a step with Lightning's DDP and FSDP2, transformers' Trainer and bare Megatron
	$(RUN) -m benchmarks.peers $(ARGS)

bench-preference: $(INSTALLED)  ## compare a DPO step with TRL (if installed), and its memory with gathered logits
	$(RUN) -m benchmarks.preference $(ARGS)

bench-rehearse: $(INSTALLED)  ## compare plans with rehearsals of runs of real sizes, and measure what a rehearsal takes
	$(RUN) -m benchmarks.rehearse $(ARGS)

bench-scale: $(INSTALLED)  ## count what grows with the number of ranks: collectives, files and bytes
	$(RUN) -m benchmarks.scale $(ARGS)

bench-startup: $(INSTALLED)  ## measure the time of the import, `lightning-mcore --help` and `plan`
	$(RUN) -m benchmarks.startup $(ARGS)

bench-vision: $(INSTALLED)  ## measure a vision tower's time and memory: trained, frozen, and with images distributed
	$(RUN) -m benchmarks.vision $(ARGS)

plots: $(INSTALLED)  ## draw the benchmark results into docs/images
	$(RUN) -m benchmarks.plots $(ARGS)

gpu: $(INSTALLED)  ## run all tests and benchmarks that need a GPU; if interrupted, run it again to continue
	$(RUN) -m tests.gpu $(ARGS)

torture: $(INSTALLED)  ## kill ranks at random moments during saves, 500 times
	$(RUN) -m benchmarks.checkpoint_torture $(ARGS)

mutate: $(INSTALLED)  ## damage each kind of file that a run reads, 500 times
	$(RUN) -m tests.mutations $(ARGS)

faults: $(INSTALLED)  ## make a hundred training runs fail, each in a different way, and check that all ranks exit
	$(RUN) -m tests.faults $(ARGS)

house: $(INSTALLED)  ## report lines per folder, comment and docstring density, longest files and functions
	$(RUN) -m tests.house

clean:  ## remove caches, build products and the output of runs; keep the environments
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache lightning_logs checkpoints outputs
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +
