# `make` lists the targets. Every one of them sets up first what it needs; what is up to date costs a second.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PACKAGES := nas devices runtimes search_spaces dashboard tests scripts benchmarks
STUDY := demo-$(shell date +%Y%m%d-%H%M%S)

# The first Python on PATH that is 3.11 or newer; `make PYTHON=/path/to/python` chooses another.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v $$p && break; done)

# Not among them: kill_campaign (kills processes for an hour), fault_campaign (breaks a farm for half of one, as root),
# farm_load (wants the machine for itself), and of search all but its timing (hours).
BENCHES ?= llama_cpp_equivalence first_number workloads against_llama_bench \
	attention_kernel executorch_blockwise

# $(call timed,COMMAND): the command, what it is and how long it took.
timed = @echo '$(1)'; begun=$$(date +%s); $(1) || exit; echo "took $$(($$(date +%s) - begun)) s"

# Containers often set it. uv installs packages without bytecode, so that every process would compile torch or Ray again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup tools builds demo test test-all lint lint-types lint-others bench truth lock docs clean
.DEFAULT_GOAL := help

help:
	@echo "make setup   .venv with everything the demo and the tests need, and the llama.cpp build (first time: 3-5 min)"
	@echo "make demo    search a small space on this machine and show its Pareto front"
	@echo "make builds  every runtime build that the tests need: tools, patched and arm64 beside the stock one (first time: 8-12 min)"
	@echo "make test    lint, types, import rules, documentation checks, these builds and the tests"
	@echo "make test-all  the same with the exhaustive tests: more layouts, quantisations, faults and kills, all store tests on PostgreSQL"
	@echo "make lint    the same without builds and tests"
	@echo "make bench   performance and search-efficiency benchmarks, as JSON"
	@echo "make truth   train what the literature has an order of, and compare (an hour; continues where it was stopped)"
	@echo "make docs    write the generated parts of docs/"
	@echo "make lock    resolve requirements.lock again"
	@echo "make clean   remove build products and tool caches from the checkout; .venv, studies and downloads stay"

$(READY): pyproject.toml requirements.lock scripts/setup_venv.py
	@test -n "$(PYTHON)" || { echo "setup: no Python 3.11 or newer on PATH (Debian, Ubuntu: apt install python3)" >&2; exit 1; }
	@$(PYTHON) scripts/setup_venv.py
	@touch $@

# The runtime's own cache is keyed by the content of what is built: it knows better than a time stamp what is current.
setup: $(READY)
	@$(BIN)/nas runtime build llama.cpp

# Tests find these in the cache: a test that compiled for minutes would hit its time limit on a fresh machine.
builds: setup
	@echo "builds: ExecuTorch's runner and patched llama.cpp, for this machine and arm64, and llama.cpp's tools; the cache is asked first" >&2
	@$(BIN)/nas runtime build executorch
	@$(BIN)/nas runtime build executorch --target aarch64-linux
	@$(BIN)/nas runtime build llama.cpp --tools
	@$(BIN)/nas runtime build llama.cpp --patched
	@$(BIN)/nas runtime build llama.cpp --patched --target aarch64-linux

demo: setup
	$(BIN)/nas launch --space search_spaces/lfm2-demo.yaml --study $(STUDY) --yes

lint: $(READY)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync lint-types lint-others

# Each of the two takes about as long as the other where nothing is cached.
lint-types:
	$(call timed,$(BIN)/mypy -p nas)
	$(call timed,$(BIN)/mypy scripts)
	$(call timed,$(BIN)/mypy -p benchmarks)

lint-others:
	$(call timed,$(BIN)/ruff check $(PACKAGES))
	$(call timed,$(BIN)/ruff format --check $(PACKAGES))
	$(call timed,$(BIN)/lint-imports)
	$(call timed,$(BIN)/python scripts/check_names.py)
	$(call timed,$(BIN)/python scripts/write_docs.py --check)

# As root on Debian or Ubuntu what tests need is installed; elsewhere tests whose tools are missing are left out, and
# listed at the beginning and at the end. With CI=true a missing tool is a failure.
tools: $(READY)
	@$(BIN)/python scripts/tools_for_tests.py install

# A file's tests run in one process, so that it makes its fixtures once; tests/conftest.py puts long files first. Those
# of tests/integration, with real processes, wait more than they compute: three at a time keep two cores busy.
# Several processes share the cores: threads of torch that spin while they wait would keep them from each other.
test: export GOMP_SPINCOUNT = 1000
test: setup lint tools builds
	$(call timed,$(BIN)/python -m pytest --durations=15 --durations-min=5 -n 2 --dist loadfile --no-loadscope-reorder tests/unit tests/contract)
	$(call timed,$(BIN)/python -m pytest --durations=15 --durations-min=5 -n 3 --dist loadfile --no-loadscope-reorder tests/integration)
	$(call timed,$(BIN)/python -m pytest -n 2 --dist loadfile tests/browser)
	@$(BIN)/python scripts/tools_for_tests.py report

test-all: export HILNAS_TEST_ALL = 1
test-all: test

bench: setup
	@for name in $(BENCHES); do $(BIN)/python benchmarks/$$name.py || exit 1; done
	@$(BIN)/python -m benchmarks.search time

truth: $(READY)
	$(BIN)/python -m benchmarks.quality.truth run
	$(BIN)/python -m benchmarks.quality.truth report

docs: $(READY)
	$(BIN)/python scripts/write_docs.py

lock:
	$(PYTHON) scripts/write_lock.py

clean:
	rm -rf build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
