# All that is needed beforehand: Python 3.11 or newer, make, a C++ compiler and a Python package registry.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# uv leaves compiling modules to their first import. With this variable Python would compile them at every start.
unexport PYTHONDONTWRITEBYTECODE
# torch looks for ninja on PATH alone.
WITH_NINJA := PATH="$(CURDIR)/$(BIN):$$PATH"

PARALLEL := --numprocesses 2 --dist loadgroup --no-loadscope-reorder

# `$(call install,FILE,OPTIONS)` installs the requirements of FILE with uv, or with pip where uv is missing or fails.
# Of several indexes uv takes the best version, as pip does.
define install
test -x $(BIN)/uv && { $(PIP_INDEXES); cat $(1); } | \
	$(BIN)/uv pip install --python $(BIN)/python --index-strategy unsafe-best-match $(2) --requirement - || \
	{ echo "uv cannot install the packages: pip does, which takes longer"; $(BIN)/pip install $(2) --requirement $(1); }
endef
# pip's settings of indexes as lines of a requirements file, because uv does not read pip's configuration.
# The first line of a setting counts: pip lists the environment (PIP_INDEX_URL) before the files.
PIP_INDEXES = $(BIN)/pip config list | sed -E "s/^(:env:|global|install)\.//; s/=/ /; s/'//g; s/\\\\n/ /g" | \
	awk '!seen[$$1]++' | \
	awk '/^(index-url|extra-index-url|find-links) / { for (i = 2; i <= NF; i++) print "--" $$1, $$i } \
		/^no-index [^0FfNn]/ { print "--no-index" }'

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all check bench gpu parts lock clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 10

setup: .venv/installed  ## make .venv and install what training needs (requirements.txt) and the command cifar-zero

.venv/installed: requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --only-binary uv "uv==0.13.*" 2> /dev/null || true
	@$(call install,requirements.txt,--editable .)
	touch $@

# A step takes longer under ZeRO 3 than under plain PyTorch, so a batch has 64 images, not the tutorial's 4.
SHORT := --batch_size 64 --optimizer adam --max_steps 500 --log_interval 10

train: setup  ## train the tutorial's model under plain PyTorch and under ZeRO 3, on CIFAR-10 or else on the built-in digits
	$(BIN)/python train.py $(SHORT) --name baseline
	$(BIN)/python train.py $(SHORT) --name zero_3 --strategy deepspeed_stage_3 --zero.param_persistence_threshold 0 --audit
	$(BIN)/cifar-zero compare --runs $(call newest,baseline) $(call newest,zero_3)

# The folder of a name's newest run. The names of runs on the built-in digits have a suffix.
newest = "$$(ls -td runs/$(1) runs/$(1)-digits-fallback 2> /dev/null | head -1)"

.venv/dev: .venv/installed requirements.lock
	@$(call install,requirements.lock,--require-hashes)
	touch $@

# What offloads the optimizer compiles it at its first use: a minute, which is no test's.
.venv/cpu_adam: .venv/dev
	$(WITH_NINJA) $(BIN)/python -c 'from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load(verbose=False)'
	touch $@

test: check .venv/cpu_adam  ## pass the checks and the tests
	$(WITH_NINJA) $(BIN)/pytest $(PARALLEL)

check: .venv/dev  ## ruff and pyright
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: .venv/dev  ## one round of each comparison with the reference loops: a few minutes (docs/performance.md)
	for name in tutorial limit data "deepspeed --stages 3"; do $(BIN)/python -m benchmarks.speed $$name --repeats 1 || exit; done

gpu: .venv/dev  ## the first minutes on a GPU: agreement, memory, speed, the largest model; continues where it stopped
	$(WITH_NINJA) $(BIN)/python -m benchmarks.gpu

# Parts of `make test-all`, the most valuable first.
PARTS := comparison resume recipes packages strategies experts commands nodes
NAMES := $(PARTS:%=test-all-%)
RANKS := tests/distributed
test-all-comparison: FILES := tests/comparison $(RANKS)/test_compare.py
test-all-resume: FILES := $(RANKS)/test_resume.py
test-all-recipes: FILES := $(RANKS)/test_recipes.py
test-all-packages: FILES := tests $(addprefix --ignore ,tests/comparison tests/commands $(RANKS))
test-all-commands: FILES := tests/commands
test-all-strategies: FILES := $(RANKS) \
	$(patsubst %,--ignore $(RANKS)/test_%.py,compare resume recipes experts two_nodes faults)
test-all-experts: FILES := $(RANKS)/test_experts.py
test-all-nodes: FILES := $(RANKS)/test_two_nodes.py $(RANKS)/test_faults.py

test-all: $(NAMES)  ## every test in its long form, in the parts that `make parts` lists

test-all-packages: .venv/other_libraries

# Libraries whose scripts a test compares; they are in no requirements.
.venv/other_libraries: .venv/dev
	$(BIN)/pip install --quiet accelerate transformers
	touch $@

$(NAMES): .venv/cpu_adam
	TEST_ALL=1 $(WITH_NINJA) $(BIN)/pytest $(PARALLEL) $(FILES)
	@echo "$@: all tests have passed"

parts:  ## list the parts of test-all, the most valuable first
	@printf 'test-all-%s\n' $(PARTS)

lock: .venv/installed  ## write requirements.lock anew, after a change of requirements.txt or requirements-dev.txt
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
		--custom-compile-command "make lock" requirements-dev.txt --output-file requirements.lock

clean:  ## remove .venv and caches; runs and data stay
	rm -rf .venv .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
