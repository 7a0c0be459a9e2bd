# Every target does its own set-up, once: a virtual environment in .venv with the versions of
# constraints/. It needs Python 3.10 or newer, make and a C compiler.
#
#   PYTHON   the interpreter .venv is made from
#   TORCH    what to install as torch
#   QUICK    1: make bench measures less, in a few minutes
#   ARGS     passed on: make test ARGS="tests/unit -k merge -n 0"

PYTHON ?= python3
PYTHON310 ?= python3.10
TORCH ?= torch==2.13.0
# Tests start processes of their own; more workers than this only make them wait for each other.
WORKERS ?= 2
ARGS ?=
QUICK ?=

VENV := .venv
OLDEST := .venv-oldest
# Made by the benchmarks, for tools that do not fit beside smdist.
PEERS := .venv-peers .venv-s3_peers .venv-smdebug
BIN := $(VENV)/bin

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

# An index or a proxy from the environment is honoured, a foreign place of installation is not.
export PIP_USER := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
unexport PIP_PREFIX PIP_REQUIRE_VIRTUALENV PIP_ROOT PIP_TARGET PYTHONHOME PYTHONPATH VIRTUAL_ENV

# Twice quiet: errors only.
PIP_INSTALL := -m pip install -qq
# The build uses the setuptools of the environment, so rebuilding the kernel needs no network.
EDITABLE := --no-build-isolation --editable

.PHONY: help setup demo test test-oldest test-tensorflow test-horovod check format bench clean distclean

help:
	@echo "make demo         capture a small distributed job and ask which rank went wrong"
	@echo "make test         all tests but those two below    (ARGS=... goes to pytest)"
	@echo "make check        ruff, mypy --strict, import-linter"
	@echo "make format       let ruff rewrite what it can"
	@echo "make bench        what capture costs, beside other tools; 40 min, QUICK=1: 5 min"
	@echo "                  (ARGS=... goes to benchmarks/run.py: ARGS=--list, ARGS='--only s3')"
	@echo "make test-oldest  unit and contract tests on Python 3.10 with the oldest dependencies"
	@echo "                  (PYTHON310=path/to/python3.10 if it is not on PATH)"
	@echo "make test-tensorflow  the tests that need TensorFlow, with Keras 3 and with Keras 2"
	@echo "make test-horovod     jobs under Horovod and MultiWorkerMirrored, merged by a coordinator;"
	@echo "                  builds Horovod the first time, which takes ten minutes on two cores"
	@echo "make clean        remove build products and caches"
	@echo "make distclean    and the virtual environments"

setup: $(VENV)/smdist.stamp

demo: setup
	@$(BIN)/python -m examples.demo $(ARGS)

# TensorFlow and Horovod have environments of their own: make test-tensorflow, make test-horovod.
test: setup
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile \
	  --ignore-glob="tests/integration/test_keras_*" \
	  --ignore=tests/integration/test_session_hook.py --ignore=tests/horovod $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy smdist tests $(wildcard examples/*.py examples/*/*.py benchmarks/*.py benchmarks/*/*.py)
	$(BIN)/lint-imports --no-logo

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	@QUICK=$(QUICK) $(BIN)/python benchmarks/run.py $(ARGS)

# $(call make_venv,interpreter,folder): keeps one that works, so that changed pins install on top.
define make_venv
	@$(1) -c 'import sys; v = sys.version_info; v >= (3, 10) or sys.exit("smdist needs Python 3.10 or newer, $(1) is %d.%d: make PYTHON=..." % v[:2])'
	@$(2)/bin/python -m pip --version >/dev/null 2>&1 || $(1) -m venv --clear $(2)
endef

$(VENV)/smdist.stamp: pyproject.toml setup.py constraints/main.txt smdist/_kernel.c
	@echo "[1/4] virtual environment in $(VENV)"
	$(call make_venv,$(PYTHON),$(VENV))
	@echo "[2/4] $(TORCH) (the largest download)"
	@$(BIN)/python $(PIP_INSTALL) -c constraints/main.txt setuptools "$(TORCH)"
	@echo "[3/4] smdist, its compiled kernel and its dependencies"
	@rm -f smdist/_kernel*.so  # the kernel is optional: an old one must not outlive a failed build
	@$(BIN)/python $(PIP_INSTALL) -c constraints/main.txt $(EDITABLE) '.[dev]'
	@echo "[4/4] checking the installation"
	@$(BIN)/python -m pip check
	@$(BIN)/python -c 'import smdist._kernel' 2>/dev/null || echo "The kernel was not compiled (is there a C compiler?): smdist will use numpy, which is slower."
	@touch $@

test-oldest: $(OLDEST)/smdist.stamp
	@$(OLDEST)/bin/python -m pytest -n $(WORKERS) --dist loadfile tests/unit tests/contracts \
	  -m "not torch and not ray" --ignore-glob="tests/unit/test_torch_*" $(ARGS)

$(OLDEST)/smdist.stamp: pyproject.toml setup.py constraints/oldest.txt smdist/_kernel.c
	@echo "[1/2] virtual environment in $(OLDEST)"
	$(call make_venv,$(PYTHON310),$(OLDEST))
	@echo "[2/2] smdist with the oldest versions it supports, without torch"
	@$(OLDEST)/bin/python $(PIP_INSTALL) -c constraints/oldest.txt setuptools
	@rm -f smdist/_kernel*.so
	@$(OLDEST)/bin/python $(PIP_INSTALL) -c constraints/oldest.txt $(EDITABLE) '.[test,servers]'
	@touch $@

TENSORFLOW_TESTS := $(wildcard tests/integration/test_keras_*.py) tests/integration/test_session_hook.py
# Each has a virtual environment of its own; with Keras 2 goes an older numpy.
test-tensorflow: .venv-keras3/smdist.stamp .venv-keras2/smdist.stamp
	@.venv-keras3/bin/python -m pytest -n 0 $(TENSORFLOW_TESTS) $(ARGS)
	@.venv-keras2/bin/python -m pytest -n 0 $(TENSORFLOW_TESTS) $(ARGS)

.venv-keras3/smdist.stamp: PINS := -c constraints/main.txt -c constraints/tensorflow.txt
.venv-keras2/smdist.stamp: PINS := -c constraints/keras2.txt
.venv-keras3/smdist.stamp .venv-keras2/smdist.stamp: pyproject.toml setup.py smdist/_kernel.c \
  constraints/main.txt constraints/tensorflow.txt constraints/keras2.txt
	@echo "[1/2] TensorFlow in $(@D)"
	$(call make_venv,$(PYTHON),$(@D))
	@$(@D)/bin/python $(PIP_INSTALL) $(PINS) "setuptools>=77" tensorflow-cpu
	@echo "[2/2] smdist"
	@$(@D)/bin/python $(PIP_INSTALL) $(PINS) $(EDITABLE) '.[test]'
	@touch $@

# The jobs run in an environment with Horovod, tests and coordinator in the main one: what they share
# is the store.
test-horovod: setup .venv-horovod/smdist.stamp
	@SMDIST_HOROVOD_PYTHON=$(CURDIR)/.venv-horovod/bin/python \
	  $(BIN)/python -m pytest -n 0 tests/horovod $(ARGS)

.venv-horovod/smdist.stamp: pyproject.toml setup.py smdist/_kernel.c constraints/keras2.txt \
  tests/environments/horovod.py
	@$(PYTHON) tests/environments/horovod.py $(@D)
	@touch $@

clean:
	rm -rf build dist smdist.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find smdist workers coordination tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(OLDEST) .venv-keras3 .venv-keras2 .venv-horovod $(PEERS)
	rm -f smdist/_kernel*.so
