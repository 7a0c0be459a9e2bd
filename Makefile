# Every target does its own set-up, once: a virtual environment in .venv with the versions of
# constraints/. It needs Python 3.10 or newer, make and a C compiler. Tests under Horovod have an
# environment of their own, which needs Python 3.11 and a C++ compiler.
#
#   PYTHON   the interpreter .venv is made from
#   HOROVOD_PYTHON  the one .venv-horovod is made from
#   TORCH    what to install as torch
#   QUICK    1: make bench measures less, in a few minutes
#   ARGS     passed on: make test ARGS="tests/unit -k merge -n 0"

PYTHON ?= python3
PYTHON310 ?= python3.10
HOROVOD_PYTHON ?= $(PYTHON)
TORCH ?= torch==2.13.0
# Tests start processes of their own; more workers than this only make them wait for each other.
WORKERS ?= 2
ARGS ?=
QUICK ?=

VENV := .venv
OLDEST := .venv-oldest
HOROVOD := .venv-horovod
# Made by the benchmarks, for tools that do not fit beside smdist.
PEERS := .venv-peers .venv-s3_peers .venv-smdebug
BIN := $(VENV)/bin
KERNEL := smdist/kernel/_native.c smdist/kernel/_native_variants.h
RUN_TESTS = $(BIN)/python tests/environments/matrix.py --workers $(WORKERS)

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules
# Environments share the compiled kernel, and tests the machine.
.NOTPARALLEL:

# An index or a proxy from the environment is honoured, a foreign place of installation is not.
export PIP_USER := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
unexport PIP_PREFIX PIP_REQUIRE_VIRTUALENV PIP_ROOT PIP_TARGET PYTHONHOME PYTHONPATH VIRTUAL_ENV

# Twice quiet: errors only.
PIP_INSTALL := -m pip install -qq
# The build uses the setuptools of the environment, so rebuilding the kernel needs no network.
EDITABLE := --no-build-isolation --editable

.PHONY: help setup demo test test-fast test-main test-kernel test-tensorflow test-horovod test-oldest soak check format bench clean distclean

help:
	@echo "make demo         capture a small distributed job and ask which rank went wrong"
	@echo "make test-fast    unit and contract tests in two minutes, while you work: without what needs"
	@echo "                  torch, an S3 server or seconds, and with fewer random examples"
	@echo "make test         all tests, in parts: the four below, one after the other"
	@echo "                  (with ARGS=... the first part alone; ARGS goes to pytest)"
	@echo "make test-main        what needs neither TensorFlow nor Horovod"
	@echo "make test-kernel      the C kernel under ASan and UBSan, compiled with -Wall -Wextra -Werror"
	@echo "make test-tensorflow  the hooks for TensorFlow, with Keras 3 and with Keras 2"
	@echo "make test-horovod     jobs under Horovod and MultiWorkerMirrored, merged by a coordinator"
	@echo "                  (the first of the last two builds Horovod, once: ten minutes on two cores)"
	@echo "make soak         the first part with all randomised cases; make test runs a share of them,"
	@echo "                  drawn by SMDIST_TEST_SEED, by default from the day and the commit"
	@echo "make test-oldest  unit and contract tests on Python 3.10 with the oldest dependencies"
	@echo "                  (PYTHON310=path/to/python3.10 if it is not on PATH)"
	@echo "make check        ruff, mypy --strict, import-linter, the kernel without warnings"
	@echo "make format       let ruff rewrite what it can"
	@echo "make bench        what capture costs, beside other tools; 63 min, QUICK=1: 5 min"
	@echo "                  (ARGS=... goes to benchmarks/run.py: ARGS=--list, ARGS='--only s3')"
	@echo "make clean        remove build products and caches"
	@echo "make distclean    and the virtual environments"

setup: $(VENV)/smdist.stamp

demo: setup
	@$(BIN)/python -m examples.demo $(ARGS)

# In parts, each in its environment. With ARGS, only what needs neither TensorFlow nor Horovod.
ifeq ($(strip $(ARGS)),)
test: setup $(VENV)/tensorflow.stamp $(HOROVOD)/smdist.stamp
	@$(RUN_TESTS) main kernel tensorflow horovod
else
test: test-main
endif

# What needs torch, a server or seconds is left out, and laws are tried with fewer examples.
test-fast: setup
	@$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --hypothesis-profile fast \
	  -m "not slow and not torch and not s3" --ignore=tests/unit/workers/torch_adapter \
	  tests/unit tests/contracts $(ARGS)

test-main: setup
	@$(RUN_TESTS) main -- $(ARGS)

test-tensorflow: $(VENV)/tensorflow.stamp $(HOROVOD)/smdist.stamp
	@$(RUN_TESTS) tensorflow -- $(ARGS)

# The kernel's own tests, with a kernel compiled for ASan and UBSan.
test-kernel: setup
	@$(RUN_TESTS) kernel -- $(ARGS)

# Jobs run in the environment with Horovod, tests and coordinator in the main one.
test-horovod: setup $(HOROVOD)/smdist.stamp
	@$(RUN_TESTS) horovod -- $(ARGS)

# Everything that make test draws a share of.
soak: setup
	@SMDIST_SOAK=1 $(RUN_TESTS) main -- $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy smdist tests $(wildcard examples/*.py examples/*/*.py benchmarks/*.py benchmarks/*/*.py)
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tests/environments/sanitized_kernel.py --compile-only

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup $(VENV)/tensorflow.stamp
	@QUICK=$(QUICK) $(BIN)/python benchmarks/run.py $(ARGS)

# $(call make_venv,interpreter,folder): keeps one that works, so that changed pins install on top.
define make_venv
	@$(1) -c 'import sys; v = sys.version_info; v >= (3, 10) or sys.exit("smdist needs Python 3.10 or newer, $(1) is %d.%d: make PYTHON=..." % v[:2])'
	@$(2)/bin/python -m pip --version >/dev/null 2>&1 || $(1) -m venv --clear $(2)
endef

$(VENV)/smdist.stamp: pyproject.toml setup.py constraints/main.txt $(KERNEL)
	@echo "[1/4] virtual environment in $(VENV)"
	$(call make_venv,$(PYTHON),$(VENV))
	@echo "[2/4] $(TORCH) (the largest download)"
	@$(BIN)/python $(PIP_INSTALL) -c constraints/main.txt setuptools "$(TORCH)"
	@echo "[3/4] smdist, its compiled kernel and its dependencies"
	@rm -f smdist/kernel/_native*.so  # the kernel is optional: an old one must not outlive a failed build
	@$(BIN)/python $(PIP_INSTALL) -c constraints/main.txt $(EDITABLE) '.[dev]'
	@echo "[4/4] checking the installation"
	@$(BIN)/python -m pip check
	@$(BIN)/python -c 'import smdist.kernel._native' 2>/dev/null || echo "The kernel was not compiled (is there a C compiler?): smdist will use numpy, which is slower."
	@touch $@

test-oldest: $(OLDEST)/smdist.stamp
	@$(OLDEST)/bin/python -m pytest -n $(WORKERS) --dist loadfile tests/unit tests/contracts \
	  -m "not torch and not ray" --ignore=tests/unit/workers/torch_adapter $(ARGS)

$(OLDEST)/smdist.stamp: pyproject.toml setup.py constraints/oldest.txt $(KERNEL)
	@echo "[1/2] virtual environment in $(OLDEST)"
	$(call make_venv,$(PYTHON310),$(OLDEST))
	@echo "[2/2] smdist with the oldest versions it supports, without torch"
	@$(OLDEST)/bin/python $(PIP_INSTALL) -c constraints/oldest.txt setuptools
	@rm -f smdist/kernel/_native*.so
	@$(OLDEST)/bin/python $(PIP_INSTALL) -c constraints/oldest.txt $(EDITABLE) '.[test,servers]'
	@touch $@

# Current TensorFlow, with Keras 3, fits into the main environment; the demo can do without.
$(VENV)/tensorflow.stamp: $(VENV)/smdist.stamp constraints/tensorflow.txt
	@echo "[1/1] TensorFlow in $(VENV)"
	@$(BIN)/python $(PIP_INSTALL) -c constraints/main.txt -c constraints/tensorflow.txt tensorflow-cpu
	@$(BIN)/python -m pip check
	@touch $@

# Horovod, and the last TensorFlow with Keras 2 and estimators, which ask for an older numpy and an
# older protobuf than Ray.
$(HOROVOD)/smdist.stamp: pyproject.toml setup.py $(KERNEL) constraints/horovod.txt \
  tests/environments/horovod.py
	@$(HOROVOD_PYTHON) tests/environments/horovod.py $(@D)
	@touch $@

clean:
	rm -rf build dist smdist.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find smdist workers coordination tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(OLDEST) $(HOROVOD) $(PEERS)
	rm -f smdist/kernel/_native*.so
