# `make demo` tunes an example, `make quick` and `make test` run tests; each installs what it needs.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python

# DeepSpeed compiles its operators once, not once per trial.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.cache/torch_extensions

# A search at the same global batch size that takes half a minute.
DEMO_OPTIONS ?= --max-trials 14

.PHONY: setup demo lint quick fast-tests browser operator test nightly test-cluster dist gallery docs pictures compat bench real-scripts frameworks soak mutants clean

setup: $(VENV)/.installed

# uv takes half of pip's time for torch; `make INSTALL=".venv/bin/python -m pip install"` uses pip.
INSTALL ?= $(VENV)/bin/uv pip install --python $(PY)

# The newest setuptools: uv would choose an older torch for that of an older Python.
$(VENV)/bin/uv:
	$(PYTHON) -m venv --upgrade-deps $(VENV)
	$(PY) -m pip install --quiet uv

$(VENV)/.installed: pyproject.toml $(VENV)/bin/uv
	$(INSTALL) --quiet --editable '.[dev]'
	# Beside the environment: where DeepSpeed finds it, every process imports it, for 2.5 s.
	$(INSTALL) --quiet --upgrade --target $(VENV)/mlflow mlflow-skinny
	touch $@

# What a demo needs, without the tools of the tests.
$(VENV)/.demo: pyproject.toml $(VENV)/bin/uv
	$(INSTALL) --quiet --editable '.[deepspeed,report]'
	touch $@

# A small model, trained with a micro batch of 1 and accumulation, as after an out of memory.
demo: $(VENV)/.demo
	cd examples/plain && $(CURDIR)/$(PY) -m dsat tune --devices 1 $(DEMO_OPTIONS) train.py \
		--deepspeed --deepspeed_config ds_config_accumulating.json --width 128 --length 32

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# mypy takes one core, so the tests go on beside it.
quick:
	$(MAKE) --jobs 2 lint fast-tests

fast-tests: setup
	$(PY) -m pytest -n 2 -m 'not slow and not nightly and not cluster'

# Nightly tests open the report in a real browser; Debian's packages have one.
browser:
	@command -v chromedriver >/dev/null || { apt-get update -qq && \
		apt-get install -qq -y --no-install-recommends chromium chromium-driver >/dev/null; } || \
		{ echo "make nightly needs Chromium and its driver: install chromium and chromium-driver"; exit 1; }

# Trials find DeepSpeed's operator compiled: beside other tests that takes longer than they may. It
# is compiled anew by another ninja than theirs.
operator: setup
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" DS_ACCELERATOR=cpu $(PY) -c "from deepspeed.ops.op_builder import cpu; \
		cpu.ShareMemCommBuilder().load(verbose=False)"

test:
	$(MAKE) --jobs 2 lint operator
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not cluster and not nightly'

# What takes longer than a change can wait for: browsers, the site, mutations, attacks, clusters,
# fresh versions.
nightly: test browser
	$(INSTALL) --quiet peft
	$(PY) -m pytest -n 2 --dist loadfile -m nightly
	$(MAKE) test-cluster
	$(MAKE) mutants
	$(MAKE) soak SOAK_OPTIONS="--scale 0.05"
	$(MAKE) compat COMPAT="--short oldest newest"

# Real daemons of Slurm and Ray, several nodes on this machine, and an ssh server. Debian's packages
# have the others; Ray's jobs need its dashboard.
CLUSTER := slurmctld slurmd slurm-client openssh-client openssh-server
test-cluster: setup
	@{ command -v slurmctld && command -v sshd; } >/dev/null || { apt-get update -qq && \
		apt-get install -qq -y --no-install-recommends $(CLUSTER) >/dev/null; } || \
		{ echo "make test-cluster needs Slurm and sshd: install $(CLUSTER)"; exit 1; }
	$(PY) -m pip install --quiet 'ray[default]>=2.40'
	$(PY) -m pytest -m cluster

# Predicted memory of well-known models on usual machines: docs/gallery.md and its tables.
gallery: setup
	$(PY) -m benchmarks.gallery $(GALLERY_OPTIONS)

# Source distribution and wheel in build/dist, checked as a package index checks them.
dist: setup
	rm -rf build/dist
	$(PY) -m build --installer uv --outdir build/dist .
	$(PY) -m twine check --strict build/dist/*

# The references in docs/options.md and docs/settings.md, and the documentation as a site in build/site.
docs: setup
	$(PY) -m testing.reference
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

# The pictures in docs/ and in the README: the report of the recorded run, plots of RUN=dsat_runs/NAME-1.
pictures: setup browser
	$(PY) -m testing.pictures $(RUN)

# Other versions of torch and DeepSpeed: some 6 GB and half an hour each; COMPAT=older takes one,
# COMPAT="--keep older" leaves its environment for the next time.
compat: setup
	$(PY) -m testing.compat $(COMPAT)

# SciPy for Optuna's GP sampler alone: transformers imports it where it is installed.
bench: setup
	$(INSTALL) --quiet scipy
	$(PY) -m benchmarks.results $(BENCH_OPTIONS)

# Scripts as people have them, tuned as a new user would: a few minutes each.
real-scripts: setup
	$(PY) -m benchmarks.real_scripts $(SCRIPTS)

# Small scripts of many frameworks under every launcher, half a minute each.
frameworks: setup
	$(INSTALL) --quiet --upgrade --target $(VENV)/frameworks --no-deps \
		trl peft datasets dill multiprocess xxhash
	$(PY) -m testing.tuned_scripts $(FRAMEWORKS)

# Every attack in full, an hour or two; SOAK_OPTIONS="--scale 0.1" makes a tenth.
soak: setup
	$(PY) -m testing.soak $(SOAK_OPTIONS)

# Small changes that break a documented rule: a test must catch each of them.
mutants: operator
	$(PY) -m testing.mutants $(MUTANTS)

clean:
	rm -rf $(VENV) .cache dsat_runs build *.egg-info
