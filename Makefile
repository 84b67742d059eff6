# make demo | test | test-full | test-all | test-oldest | mutants | lint | proto | image | sizes | clean. See README.md for TORCH and TORCH_INDEX_URL.
#
# .venv -> torch -> the project's dependencies -> the C++ kernels. Each step leaves a stamp in .venv/stamps, so that a
# second run does nothing, and a change of TORCH, pyproject.toml or csrc repeats only what depends on it.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Which torch. A CUDA machine: the default, from the normal index. A CPU-only machine, to spare gigabytes of CUDA
# libraries: TORCH_INDEX_URL=<index of CPU builds>.
TORCH ?= torch==2.13.0
TORCH_INDEX_URL ?=
EXTRAS ?= serve,ray,gguf,dev
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v $$p; break; }; done)
PYTEST_ARGS ?=
# Processes that run the tests, a file at a time each; 0: this one alone.
JOBS ?= 2
# The same for what make test leaves out: models on ranks, which wait for each other.
JOBS_FULL ?= 3
# The oldest supported transformers (models/adapter.py, VERSION_RANGE), with what it needs in another version; and how
# many seconds a package index gets for them.
OLDEST_FETCH_S := 300
OLDEST := "transformers==5.16.0" "huggingface-hub<2" httpx httpcore h11 anyio
# Of `make image`: cpu or cuda; and further arguments of the builder.
VARIANT ?= cpu
BUILD_ARGS ?=

VENV := .venv
STAMPS := $(VENV)/stamps
BIN := $(VENV)/bin
PYTEST = $(BIN)/python -m pytest -q -n
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --constraint requirements/constraints.txt
CSRC := $(shell find csrc -type f 2>/dev/null)
say = @echo "==> $(1)"

.PHONY: help demo test test-full test-all test-oldest mutants lint proto image sizes clean setup FORCE

help:
	@echo "make demo    a small MoE model on two Ray ranks, answers streamed through the gRPC client"
	@echo "make test    the test suite"
	@echo "make test-full what make test leaves out: every architecture in every setting (minutes)"
	@echo "make test-all both"
	@echo "make test-oldest the tests of models with the oldest transformers that is supported"
	@echo "make mutants faults put into the code one at a time, each of which a named test must catch (minutes)"
	@echo "make lint    ruff, mypy, clang-format, import rules, generated proto modules"
	@echo "make proto   generate the proto modules again"
	@echo "make image   the container image epruntime:cpu (VARIANT=cuda: epruntime:cuda), by docker, podman or buildah"
	@echo "make sizes   lines per file"
	@echo "make clean   remove what was built here"

$(STAMPS)/venv:
	@test -n "$(PYTHON)" || { echo "epruntime needs Python 3.11 or newer with its venv module (Debian: python3-venv);" \
	    "set PYTHON=/path/to/python"; exit 1; }
	$(call say,making $(VENV) with $(PYTHON))
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@$(PIP) -q setuptools wheel
	@touch $@

# Holds the choice; rewritten only when it changes.
$(STAMPS)/torch-choice: $(STAMPS)/venv FORCE
	@echo "$(TORCH) $(TORCH_INDEX_URL)" | cmp -s - $@ || echo "$(TORCH) $(TORCH_INDEX_URL)" > $@

# torch first, by itself: resolved along with the rest it might be taken in another build.
$(STAMPS)/torch: $(STAMPS)/torch-choice
	$(call say,installing $(TORCH) (a few hundred megabytes, more with CUDA))
ifeq ($(strip $(TORCH_INDEX_URL)),)
	@$(PIP) "$(TORCH)"
else
	@$(PIP) --no-deps --index-url "$(TORCH_INDEX_URL)" "$(TORCH)"
endif
	@touch $@

$(STAMPS)/project: $(STAMPS)/torch pyproject.toml requirements/constraints.txt
	$(call say,installing epruntime[$(EXTRAS)] and its dependencies)
	@before=$$($(BIN)/python -m pip list --format=freeze | grep '^torch=='); \
	    EPRUNTIME_SKIP_EXTENSION=1 $(PIP) --no-build-isolation --editable ".[$(EXTRAS)]"; \
	    after=$$($(BIN)/python -m pip list --format=freeze | grep '^torch=='); \
	    test "$$before" = "$$after" || { echo "torch changed from $$before to $$after: set TORCH to a version that" \
	    "pyproject.toml allows"; exit 1; }
	@touch $@

$(STAMPS)/kernels: $(STAMPS)/project setup.py $(CSRC)
	$(call say,building the C++ kernels (about 20 s))
	@rm -f epruntime/_C.*.so epruntime/_kv.*.so
	@$(BIN)/python setup.py -q build_ext --inplace
	@$(BIN)/python -c 'from epruntime.ops.extension import kernel_signature; print("kernels:", kernel_signature())'
	@touch $@

setup: $(STAMPS)/kernels

demo: setup
	$(call say,running examples/demo.py)
	@$(BIN)/python examples/demo.py

test: setup
	$(call say,running the tests)
	@$(PYTEST) $(JOBS) $(PYTEST_ARGS)

test-full: setup
	$(call say,running the tests that make test leaves out)
	@$(PYTEST) $(JOBS_FULL) -m full $(PYTEST_ARGS)

test-all: setup
	$(call say,running all tests)
	@$(PYTEST) $(JOBS) -m '' $(PYTEST_ARGS)

# The oldest transformers lies beside the installed one, and comes first on the path of these tests alone.
$(STAMPS)/oldest: $(STAMPS)/project
	$(call say,fetching the oldest supported transformers)
	@rm -rf $(VENV)/oldest
	@timeout $(OLDEST_FETCH_S) $(BIN)/python -m pip install -q --no-deps --timeout 20 --retries 2 --target $(VENV)/oldest \
	    $(OLDEST) || { rm -rf $(VENV)/oldest; \
	    echo "the oldest transformers did not come from the package index in $(OLDEST_FETCH_S) s: no test was run with it"; exit 1; }
	@touch $@

test-oldest: setup $(STAMPS)/oldest
	$(call say,running the tests of models with the oldest transformers)
	@PYTHONPATH=$(CURDIR)/$(VENV)/oldest $(PYTEST) $(JOBS_FULL) -m '' tests/e2e/test_conformance.py \
	    tests/e2e/test_conformance_list.py tests/e2e/test_routing_traps.py \
	    tests/unit/test_models_*.py tests/unit/test_text_part.py \
	    "tests/e2e/test_invariance.py::test_same_bits_in_any_company[mixtral-float32-odd]" \
	    "tests/e2e/test_invariance.py::test_same_bits_in_any_company[deepseek_v3-bfloat16-odd]" $(PYTEST_ARGS)

mutants: setup
	$(call say,putting faults in)
	@$(BIN)/python tests/mutants/run_mutants.py $(MUTANTS)

lint: setup
	$(call say,ruff)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	$(call say,mypy)
	@$(BIN)/mypy
	$(call say,clang-format)
	@$(BIN)/clang-format --dry-run -Werror $$(find csrc -name '*.h' -o -name '*.cpp')
	$(call say,import rules)
	@$(BIN)/lint-imports
	$(call say,generated proto modules)
	@$(BIN)/python -m epruntime.proto.generate --check

proto: setup
	@$(BIN)/python -m epruntime.proto.generate

# TORCH and TORCH_INDEX_URL as above. `--format docker`: the image format that has health checks.
image:
	$(call say,building the image epruntime:$(VARIANT))
	@if docker info >/dev/null 2>&1; then build=(docker build); \
	elif command -v podman >/dev/null; then build=(podman build --format docker); \
	elif command -v buildah >/dev/null; then build=(buildah build --format docker); \
	else echo "no builder: this needs docker with its engine running, podman, or buildah"; exit 1; fi; \
	"$${build[@]}" --target "$(VARIANT)" --build-arg TORCH="$(TORCH)" --build-arg TORCH_INDEX_URL="$(TORCH_INDEX_URL)" \
	    $(BUILD_ARGS) -t "epruntime:$(VARIANT)" .

sizes:
	@git ls-files '*.py' '*.pyi' '*.cpp' '*.h' '*.proto' | grep -v _pb2 | xargs wc -l | sort -n

clean:
	rm -rf $(VENV) build dist *.egg-info epruntime/_C.*.so epruntime/_kv.*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find epruntime tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
