# Entry points: `make install`, `make run`, `make up`, `make test`. Everything is installed into .venv only; runs and Prefect's
# database are in ./store.

PYTHON ?= python3
BIN := .venv/bin
# For Trainium: the address of AWS's package index for the Neuron SDK. If set, `make` also installs the extra `neuron`.
NEURON_INDEX ?=
INDEX = $(if $(NEURON_INDEX),--extra-index-url "$(NEURON_INDEX)")
INSTALLED := .venv/installed$(if $(NEURON_INDEX),-neuron)
# Debian packages that some tests need: g++ to compile graphs for a CPU, slurm-wlm and munge to start a Slurm cluster of several
# nodes on this machine, postgresql for a shared Prefect server, chromium for reports and Prefect's UI.
SYSTEM_PACKAGES := g++ slurm-wlm munge postgresql chromium

# Two workers more than there are cores (tests/conftest.py), each with one OpenMP thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

# Without cached bytecode, each process of a run or a test compiles torch's modules again: 4 s each, and the suite starts hundreds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run install up check-device lint test test-fast test-cuda test-system

run: $(INSTALLED)
	@$(BIN)/trainshed run tiny

install: $(INSTALLED)

up: $(INSTALLED)
	@$(BIN)/trainshed up

check-device: $(INSTALLED)
	@$(BIN)/python -m modeling.check_device

lint: .venv/installed-for-tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo

test: lint
	$(PYTEST)

# Without the tests that start servers, clusters or processes, or compute for long.
test-fast: lint
	$(PYTEST) -m "not slow"

# Only the tests that need a GPU; `python -m benchmarks.gpu` runs them too.
test-cuda: .venv/installed-for-tests
	$(BIN)/python -m pytest -m cuda

test-system:
	@dpkg -s $(SYSTEM_PACKAGES) > /dev/null 2>&1 || { \
	  test "$$(id -u)" = 0 || { echo "as root: apt-get install $(SYSTEM_PACKAGES)" >&2; exit 1; }; \
	  apt-get update -q && apt-get install -qy --no-install-recommends $(SYSTEM_PACKAGES); }

# Stamp files: the installation is complete and up to date.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Trainshed needs Python 3.11 or newer: make PYTHON=...")'
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@$(call install,'.')
	@touch $@

.venv/installed-neuron: .venv/installed
	@$(call install,'.[neuron]')
	@touch $@

.venv/installed-for-tests: $(INSTALLED)
	@$(call install,'.[test]')
	@touch $@

# Install with uv, which downloads and unpacks in parallel; without uv, or if it fails, with pip. pip prints nothing for minutes,
# so progress is counted from its log. --no-compile: modules are compiled on their first import, and most are never imported.
define install
echo "installing into .venv, which takes a minute or two the first time"; \
if test -z "$(NEURON_INDEX)" && command -v uv > /dev/null && uv pip install --python $(BIN)/python -c constraints.txt -e $(1); then exit; fi; \
log=.venv/install.log; count() { ls -d .venv/lib/python*/site-packages/*.dist-info | wc -l; }; before=$$(count); \
$(BIN)/pip install --no-compile --no-input --disable-pip-version-check -c constraints.txt $(INDEX) -e $(1) > $$log 2>&1 & pid=$$!; trap "kill $$pid; exit 1" INT TERM; \
while kill -0 $$pid 2> /dev/null; do \
  sleep 1; \
  test -t 1 || continue; \
  total=$$(sed -n 's/^Installing collected packages: //p' $$log | wc -w); \
  if test $$total = 0; then printf '\r  downloading: package %d' $$(grep -c '^Collecting ' $$log); \
  else printf '\r  installing: %d of %d packages' $$(($$(count) - before)) $$total; fi; \
done; \
test -t 1 && echo; \
wait $$pid || { tail -n 20 $$log >&2; exit 1; }
endef
