# `make demo` tunes the example, `make test` checks everything; both set up what they need.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python

# DeepSpeed compiles its operators once, not once per trial.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.cache/torch_extensions

# A limit that makes memory matter on any machine, and a search that ends in a few minutes.
DEMO_OPTIONS ?= --slot-memory 768MiB --max-trials 14 --max-profile-steps 8 --metric throughput

.PHONY: setup demo test bench lint clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --editable '.[examples,dev]'
	touch $@

demo: setup
	$(PY) -m dsat asha examples/core_api/deepspeed.yaml examples/core_api \
		--zero-stages 0 1 2 3 $(DEMO_OPTIONS)

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: lint
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

bench: setup
	$(PY) -m pip install --quiet --editable '.[examples,bench]'
	$(PY) -m benchmarks.results $(BENCH_OPTIONS)

clean:
	rm -rf $(VENV) .cache dsat_runs build *.egg-info
