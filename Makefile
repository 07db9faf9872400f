# `make demo` tunes the example, `make test` checks everything; both set up what they need.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python

# DeepSpeed compiles its operators once, not once per trial.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.cache/torch_extensions

.PHONY: setup demo test bench lint clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --editable '.[examples,dev]'
	touch $@

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: lint
	$(PY) -m pytest

clean:
	rm -rf $(VENV) .cache dsat_runs build *.egg-info
