# Entry points: `make install`, `make run`, `make up`, `make test`. Everything is installed into .venv (`make test-torch214`: into
# .venv-torch214); runs and Prefect's database are in ./store.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Versions of torch: 2.13, and those with a file of pins that replace some of those in constraints.txt.
TORCHES := 2.13 $(sort $(patsubst constraints-torch-%.txt,%,$(wildcard constraints-torch-*.txt)))
# The version to install; by default the installed one.
TORCH ?= $(or $(filter $(TORCHES),$(patsubst $(VENV)/installed-torch-%,%,$(wildcard $(VENV)/installed-torch-?.??))),2.13)
$(if $(filter $(TORCHES),$(TORCH)),,$(error TORCH=$(TORCH): not supported; choose one of: $(TORCHES)))
PINS := $(filter-out constraints-torch-2.13.txt,constraints-torch-$(TORCH).txt)
# For Trainium: the address of AWS's package index for the Neuron SDK. If set, `make` also installs the extra `neuron`.
NEURON_INDEX ?=
# Without a GPU: the address of PyTorch's package index for CPUs, whose torch is 0.2 GB instead of 3 GB.
TORCH_INDEX ?=
INSTALL := $(PYTHON) install.py --venv $(VENV) --index "$(TORCH_INDEX)" --index "$(NEURON_INDEX)" $(PINS:%=--pins %) \
  $(if $(NEURON_INDEX),--extra neuron)
WRONG_PYTHON := Trainshed needs Python 3.11 to 3.14, and $(PYTHON) is %d.%d; set another one: make PYTHON=python3.13
BASE := $(VENV)/installed$(PINS:constraints%.txt=%)
INSTALLED := $(BASE)$(if $(NEURON_INDEX),-neuron)
# Debian packages that some tests need: g++ and Python's headers to compile graphs for a CPU, slurm-wlm and munge to start a Slurm
# cluster of several nodes on this machine, postgresql for a shared Prefect server, chromium for reports and Prefect's UI.
NO_HEADERS := import os, sysconfig; os.path.exists(sysconfig.get_path("include") + "/Python.h") or print("python3-dev")
SYSTEM_PACKAGES = g++ $(shell $(PYTHON) -c '$(NO_HEADERS)') slurm-wlm munge postgresql chromium

# Two workers more than there are cores (tests/conftest.py), each with one OpenMP thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

# Without cached bytecode, each process of a run or a test compiles torch's modules again: 4 s each, and the suite starts hundreds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run install up check-device docs lint test test-fast test-cuda test-machines test-s3 test-system test-torch214

run: $(INSTALLED)
	@$(BIN)/trainshed run tiny

install: $(INSTALLED)

up: $(INSTALLED)
	@$(BIN)/trainshed up

check-device: $(INSTALLED)
	@$(BIN)/python -m modeling.check_device

# The documentation as a website, in build/site; a link that leads nowhere is an error.
docs: $(VENV)/installed-for-docs
	@$(BIN)/python docs/site/build.py

lint: $(VENV)/installed-for-tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

test: lint
	$(PYTEST)

# The same tests on torch 2.14, in an environment of their own.
test-torch214:
	@$(MAKE) VENV=.venv-torch214 TORCH=2.14 .venv-torch214/installed-for-tests
	$(subst $(BIN),.venv-torch214/bin,$(PYTEST))

# Without the tests that start servers, clusters or processes, or compute for long.
test-fast: lint
	$(PYTEST) -m "not slow"

# Only the tests that need a GPU; `python -m benchmarks.gpu` runs them too.
test-cuda: $(VENV)/installed-for-tests
	$(BIN)/python -m pytest -m cuda

# As root, before a release: the quickstart in fresh Debian machines (tests/machines).
test-machines: $(VENV)/installed-for-tests
	@$(BIN)/python -m tests.machines $(MACHINES)

# The tests that use S3, against Ceph's radosgw instead of moto (tests/radosgw.py), or against the server at TRAINSHED_TEST_S3.
test-s3: $(VENV)/installed-for-tests
	$(if $(TRAINSHED_TEST_S3),,$(BIN)/python -m tests.radosgw) $(BIN)/python -m pytest -m s3

test-system:
	@dpkg -s $(SYSTEM_PACKAGES) > /dev/null 2>&1 || { \
	  test "$$(id -u)" = 0 || { echo "as root: apt-get install $(SYSTEM_PACKAGES)" >&2; exit 1; }; \
	  apt-get update -q && apt-get install -qy --no-install-recommends $(SYSTEM_PACKAGES); }

# Stamp files: the installation is complete and up to date. They are removed first: an interrupted installation may have removed
# another version of torch. An installation with the extra `neuron` has the stamp of one without it, too.
$(INSTALLED): pyproject.toml constraints.txt $(PINS)
	@command -v $(PYTHON) > /dev/null || { echo "$(PYTHON): not found; as root: apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(not (3, 11) <= v < (3, 15) and ("$(WRONG_PYTHON)" % v[:2]))'
	@rm -f $(VENV)/installed*
	@$(INSTALL)
	@touch $(BASE) $@

$(VENV)/installed-for-docs: $(INSTALLED)
	@$(INSTALL) --extra docs
	@touch $@

$(VENV)/installed-for-tests: $(INSTALLED)
	@$(INSTALL) --extra test
	@touch $@
