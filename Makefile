# Needs python3 (3.11 or newer, with venv), make and git; no C compiler and no GPU.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
# Exact, because a range makes pip fetch several; another one: make setup TORCH="torch==2.12.0"
TORCH ?= torch==2.13.0
# The packs of the wheel, or the few that are asked for. Only from the command line: environments have an ARCH of theirs.
ARCHS := sm80 sm90 gfx90a
FEW := $(if $(filter command%,$(origin ARCH)),$(ARCH))
PACKS := $(or $(FEW),$(ARCHS))
# Another processor than this machine's, likewise.
FOR := $(if $(filter command%,$(origin HOST)),$(HOST))

# Parts of the tests that need Triton, which run without torch; all others run with torch and without Triton.
building := tests/build
native := tests/native
executing := tests/emulators tests/kernels
packaging := tests/attacks tests/packaging
WITH_TRITON := building native executing packaging

# Runs the targets that follow, two at a time, all of them to their ends.
SIDE_BY_SIDE := $(MAKE) --no-print-directory --jobs=2 --keep-going

# The oldest that is sure to install dependency groups is 25.1.
PIP := pip==26.3

define new_environment
@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit( \
	"error: make needs Python 3.11 or newer; name one: make PYTHON=...")'
@$(PYTHON) -m venv --clear $(@D)
endef

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Of numpy and torch: more, beside another part of the tests, wait for each other and burn most of the time so.
check test: export OMP_NUM_THREADS := 1

.PHONY: help artifacts own setup check test unit $(WITH_TRITON) with-torch lint wheel kernels reproduce fuzz bench lock clean FORCE

help: ## what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

artifacts: .venv-build/.stamp ## packs for every architecture in artifacts/, compiled in .venv-build (Triton, no torch)
ifeq ($(FOR),)
	.venv-build/bin/aotmm build $(PACKS:%=--arch %)
else
	.venv-build/bin/aotmm build $(PACKS:%=--arch %) --host $(FOR) --out build/$(FOR) --cache artifacts/.cache
endif

OWN := add softmax layer_norm
own: .venv-build/.stamp ## packs of examples/own in build/own, which tests with torch and `aotmm bench own` launch
	.venv-build/bin/aotmm build $(foreach name,$(OWN),--kernel examples/own/$(name).py:$(name)_kernel) \
		$(PACKS:%=--arch %) --out build/own --cache artifacts/.cache

setup: .venv/.stamp ## .venv with torch, the checkout and what tests and lint need; TORCH="torch==..." for another torch

check: setup ## lint, types and the tests that need no packs, no GPU and no network
	@$(SIDE_BY_SIDE) lint unit

test: artifacts own setup ## every test that can run on this machine
	@$(SIDE_BY_SIDE) building native with-torch executing packaging # the longest first

unit: setup
	.venv/bin/python -m pytest tests/unit

# The parts of the tests, which say at their ends what they left out and why.
$(WITH_TRITON): .venv-build/.stamp
	.venv-build/bin/python -m pytest $($@)

with-torch: setup
	.venv/bin/python -m pytest $(foreach part,$(WITH_TRITON),$($(part):%=--ignore=%))

lint: setup ## ruff and mypy
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

wheel: artifacts ## the wheel in dist/, with the packs; ARCH=sm90: with that one only; HOST=aarch64: for that processor
	.venv-build/bin/python wheels.py $(PACKS) $(if $(FEW),--label) $(FOR:%=--host %)

kernels: artifacts ## a wheel for each pack alone, which aotmm finds where it is installed; ARCH (or "all") and HOST likewise
	.venv-build/bin/python wheels.py --kernels $(PACKS) $(FOR:%=--host %)

reproduce: .venv-build/.stamp ## builds everything twice, as two people would, and compares every byte; minutes
	.venv-build/bin/python -m tests.packaging.reproduce

fuzz: .venv-build/.stamp ## 100,000 altered packs and wheels, none of which may be taken; minutes
	.venv-build/bin/python -m tests.attacks.fuzz

bench: artifacts setup ## measures this machine's GPU; bench-results/report.html
	@.venv/bin/python -m pip install -qq -e '.[bench]'
	.venv/bin/aotmm bench --out bench-results

clean: ## removes everything that was made, environments included
	rm -rf .venv .venv-build build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f aotmm/native/*.so
	find artifacts -mindepth 1 -maxdepth 1 ! -name README.md -exec rm -rf {} +

lock: ## pins what .venv-build is made of, with hashes, in requirements-build.txt; needs uv
	@uv pip compile pyproject.toml --extra build --extra cluster --extra cache --group test --excludes <(echo torch) \
		--universal --python-version 3.11 --generate-hashes \
		--no-header --no-annotate --no-emit-index-url --upgrade --quiet --output-file requirements-build.txt

.venv-build/.stamp: pyproject.toml requirements-build.txt
	@echo "installing Triton and what builds and tests packs into .venv-build"
	$(new_environment)
	@.venv-build/bin/python -m pip install -qq --require-hashes -r requirements-build.txt
	@.venv-build/bin/python -m pip install -qq --no-deps --no-build-isolation -e .
	@touch $@

# An overridden TORCH makes the environment anew.
.venv/.stamp: pyproject.toml $(if $(filter-out file,$(origin TORCH)),FORCE)
	@echo "installing $(TORCH) and what tests and lint need into .venv"
	$(new_environment)
	@.venv/bin/python -m pip install -qq $(PIP)
	@.venv/bin/python -m pip install -qq "$(TORCH)" --group dev -e '.[cluster,tune]'
	@touch $@
