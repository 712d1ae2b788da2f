# `make help` explains the targets. make only orders steps; what is stale is decided by content in
# `python -m flashgap reproduce` (src/flashgap/keys.py): make compares times of files, so it would run a
# notebook again after a touch, and it cannot see that a trial's record or a pinned version has changed.

.DEFAULT_GOAL := help
.PHONY: help env lab plan reproduce remeasure render publish test lint clean
SHELL := /bin/bash

PROFILE ?= auto
# The interpreter that everything runs with; another value (PY=python) uses an environment of your own.
PY ?= .venv/bin/python
FLASHGAP = $(PY) -m flashgap
NOW := $(shell date -u +%Y-%m-%dT%H:%M:%S+00:00)

export LONG REMEASURE
export JUPYTER_PREFER_ENV_PATH := 1
export PYTHONUNBUFFERED := 1
export PYTHONNOUSERSITE := 1

help: ## this list
	@echo "make TARGET [PROFILE=auto|smoke|cpu|h200|a100x8] [LONG=1]"
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: ## build or repair ./.venv (conda or mamba if there is one, else venv); nothing to do: returns at once
ifeq ($(PY),.venv/bin/python)
	@command -v python3 >/dev/null || { echo "error: python3 not found; install Python 3.11 or newer" >&2; exit 1; }
	@python3 src/flashgap/bootstrap.py
endif

lab: env ## open JupyterLab on the notebooks, with the kernel of this environment
	@$(PY) -m jupyterlab --notebook-dir=notebooks

plan: env ## trials, minutes, disk and memory, before anything runs
	@$(FLASHGAP) plan --profile $(PROFILE)

reproduce: env ## measure what is missing, run stale notebooks, render; LONG=1 adds the long generation
	@$(FLASHGAP) reproduce --profile $(PROFILE)

remeasure: env ## the same, but measure everything again
	@REMEASURE=1 FLASHGAP_SINCE=$(NOW) $(FLASHGAP) reproduce --profile $(PROFILE)

render: env ## HTML of what was run; REPLAY=1: run the notebooks on the committed records, measuring nothing
	@$(FLASHGAP) render --profile $(PROFILE) $(if $(filter 1,$(REPLAY)),--replay)

publish: env ## make the finished local records (ONLY="best prefill": of these experiments) the committed reference
	@$(FLASHGAP) publish --profile $(PROFILE) $(if $(ONLY),--only $(ONLY))

# FLASHGAP_TEST_RESULTS keeps the records of the notebooks' test run; else they go with it.
test: env ## unit and property tests, then every notebook with the smoke profile
	@OMP_NUM_THREADS=1 $(PY) -m pytest -n 2
	@results="$${FLASHGAP_TEST_RESULTS:-$$(mktemp -d)}"; \
	[ -n "$$FLASHGAP_TEST_RESULTS" ] || trap 'rm -rf "$$results"' EXIT; \
	FLASHGAP_PROFILE=smoke FLASHGAP_RESULTS="$$results" REMEASURE= LONG= \
	$(PY) -m pytest --nbval-lax --nbval-cell-timeout=300 --nbval-kernel-name=python3 -p no:xdist notebooks/ && \
	FLASHGAP_RESULTS="$$results" $(FLASHGAP) failures --profile smoke

lint: env ## format, lint and types of sources, template of notebooks
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy
	@$(FLASHGAP) lint-notebooks

clean: ## remove rendered local pages and caches; records and the environment stay
	@rm -rf figures/local artifacts .pytest_cache .mypy_cache .ruff_cache .hypothesis
