# The commands of a newcomer: `make run`, `make test`, `make up`. Everything lands in .venv; nothing else is touched.

PYTHON ?= python3
BIN := .venv/bin
# System programs that tests need, as Debian names them: g++ is what torch.compile calls on a CPU, slurm-wlm and munge make a
# cluster of several nodes on this machine, postgresql is the database of a server that a team shares, chromium
# looks at the reports and at Prefect's UI.
SYSTEM_PACKAGES := g++ slurm-wlm munge postgresql chromium

.PHONY: run up check-device test test-system

run: .venv/installed
	@$(BIN)/trainshed run tiny

up: .venv/installed
	@$(BIN)/trainshed up

check-device: .venv/installed
	@$(BIN)/python -m modeling.check_device

test: .venv/installed-for-tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

test-system:
	@dpkg -s $(SYSTEM_PACKAGES) > /dev/null 2>&1 || { \
	  test "$$(id -u)" = 0 || { echo "as root: apt-get install $(SYSTEM_PACKAGES)" >&2; exit 1; }; \
	  apt-get update -q && apt-get install -qy --no-install-recommends $(SYSTEM_PACKAGES); }

# These files stand for an installation that is finished and current.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Trainshed needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	@echo "installing into .venv, which takes some minutes the first time"
	$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/installed-for-tests: .venv/installed
	$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@
