# Every target works from nothing: it makes .venv/ when it is missing or when pyproject.toml changed.
#
#   make demo    install, then ask the demo model about a picture
#   make test    install with the test tools, then run the tests
#   make check   lint, types and tests: what CI runs
#   make bench   the benchmark of the demo model, one JSON line at the end
#   make clean   remove what the targets made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
OUTPUT := demo-output

.DEFAULT_GOAL := help
.PHONY: help demo test lint format types check bench clean

help:
	@sed -n 's/^#   //p' Makefile

$(BIN)/python:
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info < (3, 14); \
	sys.exit(0 if ok else "Python 3.11 to 3.13 is needed, %s is %d.%d; try make PYTHON=python3.12" % ((sys.executable,) + sys.version_info[:2]))'
	@$(PYTHON) -m venv $(VENV) || { echo "Python's venv module is needed (Debian: apt install python3-venv)"; exit 1; }

$(VENV)/.run-stamp: pyproject.toml | $(BIN)/python
	@echo "Installing Foveal and PyTorch into $(VENV)/ (once, some minutes) ..."
	@$(PIP) --editable .
	@touch $@

$(VENV)/.test-stamp: pyproject.toml | $(BIN)/python
	@echo "Installing Foveal, PyTorch and the test tools into $(VENV)/ (once, some minutes) ..."
	@$(PIP) --editable '.[test,dev]'
	@touch $@ $(VENV)/.run-stamp

demo: $(VENV)/.run-stamp
	@mkdir -p $(OUTPUT)
	@printf '\n> What colour is the circle?\n'
	@$(BIN)/foveal ask examples/shapes.png "What colour is the circle?"
	@printf '\n> Locate the red square.\n'
	@$(BIN)/foveal ask examples/shapes.png "Locate the red square." --boxes $(OUTPUT)/shapes-boxes.png

test: $(VENV)/.test-stamp
	@$(BIN)/python -m pytest --no-header $(PYTEST_FLAGS)

lint: $(VENV)/.test-stamp
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .

format: $(VENV)/.test-stamp
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(VENV)/.test-stamp
	@$(BIN)/mypy

check: lint types test

bench: $(VENV)/.run-stamp
	@$(BIN)/python benchmarks/bench_vl2.py --model demo-vl2

clean:
	rm -rf $(VENV) $(OUTPUT) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
