PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
DEPENDENCIES := pyproject.toml constraints.txt

.PHONY: train test lint bench zoo clean

train: $(VENV)/installed
	$(BIN)/python recipes/train.py experiment=shakespeare_llama strategy=tp

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.engine --output docs/benchmarks.md --json docs/benchmarks.json
	$(BIN)/python benchmarks/plan_time.py

zoo: $(VENV)/installed-zoo
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.zoo --output docs/models.md

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

# A stamp, not the directory: it is written only after an installation that went through.
$(VENV)/installed: $(DEPENDENCIES) | $(BIN)/python
	@echo "Installing lightning-tp into $(VENV) ..."
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/installed-dev: $(DEPENDENCIES) | $(BIN)/python
	@echo "Installing lightning-tp with its development tools into $(VENV) ..."
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/installed

# Without its dependencies: litgpt asks for an older huggingface-hub than transformers, and its model needs neither.
$(VENV)/installed-zoo: $(VENV)/installed-dev
	$(PIP) install -c constraints.txt --no-deps litgpt
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lightning-tp needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Set PYTHON=/path/to/python3.11.")'
	$(PYTHON) -m venv $(VENV)
