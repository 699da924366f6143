# make demo    install, kill a real training three times, and show the verdict
# make test    every test but the nightly ones          make nightly  every test
# make test-gpu  the tests that need GPUs, alone; says how many it found, and which tests it skipped for want of them
# make package build sdist and wheel, install each elsewhere, drill a script there
# make zoo     real resume bugs of released libraries: does chaosrun see each, and pass the releases without it?
# make bench   recovery time and cost per step, side by side with torchrun and Ray Train
# make simulate  the control plane on simulated clocks, networks, processes and disks (SEEDS=1000, SEEDS=500-600, SEEDS==1234)
# make docs    the pages as a site in site/, every link checked
# make lint    ruff and pyright                         make format   what ruff would have changed
# make clean   remove the environment, caches and runs

PYTHON ?= python3
VENV ?= .venv
JOB ?= jobs/bytelm/job.yaml
ARGS ?=
# Processes of `make test`. Three keep two processors busy: the ranks of a drill wait for each other.
JOBS ?= 3
SEEDS ?= 1000

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Compiled once, not in each of the thousands of processes that the tests start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu nightly package zoo bench simulate docs lint format browser clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(INSTALLED)-examples
	$(BIN)/chaosrun submit $(JOB) $(ARGS)

test: $(INSTALLED)-dev browser
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not nightly" $(ARGS)

test-gpu: $(INSTALLED)-dev
	$(BIN)/python -c 'import torch; print(torch.cuda.device_count(), "GPUs,", "torch", torch.__version__)'
	$(BIN)/python -m pytest -m gpu --no-fold-skipped $(ARGS)

nightly: $(INSTALLED)-dev,frameworks browser package
	$(BIN)/python -m pytest --timeout 3600 $(ARGS)

package:
	.ci/package

zoo: $(INSTALLED)-dev
	$(BIN)/python -m tests.zoo $(ARGS)

bench: $(INSTALLED)-bench
	$(BIN)/python -m tests.benchmarks $(ARGS)

simulate: $(INSTALLED)-dev
	$(BIN)/python -m tests.simulation "$(SEEDS)"

docs: $(INSTALLED)-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(INSTALLED)-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

format: $(INSTALLED)-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# What looks at the report pages, and at what a script's save does to files. Without them their tests are skipped, and say so.
browser:
	@{ command -v chromium && command -v strace; } >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && apt-get update -qq && apt-get install -qq --no-install-recommends chromium strace >/dev/null; } \
	  || echo "no chromium or strace: the tests of the report pages, or of saves, will be skipped"

# One stamp for each set of extras: installed once, and again when the requirements change.
$(INSTALLED)-%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$*]'
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) .chaosrun .pytest_cache .ruff_cache .hypothesis build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
