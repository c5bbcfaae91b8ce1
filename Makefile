# Every target takes care of its own set-up: `make test` in a fresh clone is enough.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
# Byte code is what makes a start quick: never leave it out because the shell says so.
unexport PYTHONDONTWRITEBYTECODE
export PYTHON_BIN := $(CURDIR)/.venv/bin/python
export OMP_NUM_THREADS ?= 1

LOCK := uv pip compile -q --python-version 3.11 --universal --generate-hashes --no-emit-index-url --no-header \
  --override requirements/overrides.txt

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-slow test-faults soak test-gpu bench bench-scorer lint lock

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1\t\2/' | expand -t 20

setup: ## create .venv from the lock file; PLATFORM=cpu|cuda, PYTHON=3.11|3.12
	@bash requirements/install.sh "$(PLATFORM)" "$(PYTHON)"

quickstart: setup ## train a tiny policy end to end; MODEL=qwen3_tts|moss, STEPS=4, OUTPUT_DIR=..., ARGS="key=value ..."
	@MODEL=$(MODEL) bash examples/quickstart.sh $(ARGS)

test: setup ## run the whole suite; ARGS="-k name" for a part of it
	@bash tests/run.sh $(ARGS)

test-slow: setup ## run what takes the real loop minutes: does MOSS learn
	@$(PYTHON_BIN) -m pytest -m "slow" $(ARGS)

test-faults: setup ## run the injected faults that take too long for CI
	@$(PYTHON_BIN) -m pytest -m "faults" $(ARGS)

soak: setup ## run 60 updates of the tiny loop hit by random faults; OUT=..., ARGS="--seed N --updates N"
	@$(PYTHON_BIN) -m tests.loop.soak "$${OUT:-outputs/soak}" $(ARGS)

test-gpu: setup ## run the tests that need a GPU and real weights; MODEL_PATH=Qwen3-TTS Base directory
	@: "$${MODEL_PATH:?set MODEL_PATH to a Qwen3-TTS Base directory}"
	@$(PYTHON_BIN) -m pytest tests/gpu -m "gpu or gpu_engine" $(ARGS)

bench: setup ## measure start-up, steps, rollout speed and memory on this machine
	@$(PYTHON_BIN) benchmarks/run.py $(ARGS)

bench-scorer: setup ## measure the requests a second of the scorer server; ARGS="--requests N"
	@$(PYTHON_BIN) benchmarks/scorer.py $(ARGS)

lint: setup ## check style and types
	@$(PYTHON_BIN) -m ruff check . && $(PYTHON_BIN) -m ruff format --check . && $(PYTHON_BIN) -m mypy

lock: ## write requirements/{cpu,gpu}.txt anew from the .in files
	@PATH="$$PATH:$(CURDIR)/.tools/bin"; for name in cpu gpu; do \
	  $(LOCK) "requirements/$$name.in" -o "requirements/$$name.txt"; done
