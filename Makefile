# Each target makes the environment that it needs; nothing but Python 3.11 or later is assumed.
#   make pretrain ARGS="--steps 100"     make test ARGS="tests/ops -k divergence"
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.SUFFIXES:
MAKEFLAGS += --no-print-directory --no-builtin-rules

VENV ?= .venv
CONSTRAINTS ?= constraints.txt
ARGS ?=
# Tests share the cores with XLA's own threads, so more workers than this gain nothing.
TEST_WORKERS ?= 2

PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	  2>/dev/null && echo $$p && break; done)
RUN := $(VENV)/bin/python

.PHONY: help pretrain test slow parity lint format docs bench aot aot-cuda plan plan-compile faults
.PHONY: catalog clean
.DEFAULT_GOAL := help

help:
	@echo "make pretrain   train a small mixture-of-experts language model on this machine"
	echo "make test       run the tests (make slow: the experiments that take minutes)"
	echo "make lint       check style, format and types (make format: mend what can be mended)"
	echo "make parity     compare with transformers, PEFT, causal-learn and lingam (installs PyTorch)"
	echo "make docs       build the documentation into docs/_build/html"
	echo "make bench      time the building blocks against their rivals"
	echo "make aot        compile the kernels for TPUs that need not be there (aot-cuda: for GPUs)"
	echo "make plan       memory, step time and meshes of a run on a machine that need not be there"
	echo "make faults     disturb small runs (kills, full disk, damaged files) and check the outcome"
	echo "Options for the program behind a target go into ARGS=\"...\"."

pretrain: $(VENV)/.installed-plot
	@exec $(RUN) -m experiments.pretrain $(ARGS)

test: $(VENV)/.installed-test
	@exec $(RUN) -m pytest -n $(TEST_WORKERS) --dist worksteal -q $(ARGS)

slow: $(VENV)/.installed-test
	@exec $(RUN) -m pytest -q -m slow $(ARGS)

# PyTorch stays out of the environment that users and tests run in.
parity: .venv-parity/.installed-parity
	@exec .venv-parity/bin/python -m pytest -q -m parity tests/parity $(ARGS)

lint: $(VENV)/.installed-test
	@$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright --pythonpath $(RUN)
	$(RUN) -m tools.catalog --check

format: $(VENV)/.installed-test
	@$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

catalog: $(VENV)/.installed-plot
	@$(RUN) -m tools.catalog

docs: $(VENV)/.installed-docs
	@JAX_PLATFORMS=cpu $(RUN) -m sphinx -q -W --keep-going -b html docs docs/_build/html $(ARGS)
	echo "open docs/_build/html/index.html"

bench: $(VENV)/.installed-plot
	@exec $(RUN) -m tools.bench $(ARGS)

plan: $(VENV)/.installed-plot
	@exec $(RUN) -m tools.plan $(ARGS)

faults: $(VENV)/.installed-plot
	@exec $(RUN) -m tools.faults $(ARGS)

# libtpu and the CUDA plugin change which platform JAX takes by default: environments of their own.
aot: .venv-tpu/.installed-tpu
	@TPU_SKIP_MDS_QUERY=1 JAX_PLATFORMS=cpu exec .venv-tpu/bin/python -m tools.aot --target tpu $(ARGS)

plan-compile: .venv-tpu/.installed-tpu
	@exec .venv-tpu/bin/python -m tools.plan --compile $(ARGS)

aot-cuda: .venv-cuda/.installed-cuda12
	@JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 JAX_PLATFORMS=cpu \
	  exec .venv-cuda/bin/python -m tools.aot --target cuda $(ARGS)

# A stamp per set of extras, older than what decides the versions when there is something to do. An
# installation that failed leaves no stamp, so the next call mends it.
define install
@[[ -n "$(PYTHON)" ]] || {
  echo "No Python 3.11 to 3.13 with venv was found; name one: make PYTHON=/path/to/python3.11 ..." >&2
  exit 1
}
[[ -x $(@D)/bin/python ]] && $(@D)/bin/python -c 'import pip' 2>/dev/null || {
  echo "Creating $(@D) with $$($(PYTHON) --version)"
  $(PYTHON) -m venv --clear $(@D)
}
echo "Installing jaxlib-papers[$*] into $(@D) (once, about a minute)"
$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-input \
  -c $(CONSTRAINTS) -e ".[$*]"
touch $@
endef

$(VENV)/.installed-%: pyproject.toml $(CONSTRAINTS)
	$(install)
.venv-parity/.installed-%: pyproject.toml $(CONSTRAINTS)
	$(install)
.venv-tpu/.installed-%: pyproject.toml $(CONSTRAINTS)
	$(install)
.venv-cuda/.installed-%: pyproject.toml $(CONSTRAINTS)
	$(install)

clean:
	@rm -rf build dist docs/_build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
