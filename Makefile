# One Makefile, few targets: `make help` lists them. Whichever runs first creates .venv with the
# versions of constraints.txt and every extra; later runs reuse it.

PYTHON ?= python3.11 python3 python3.12 python3.13
BIN := .venv/bin
INSTALLED := .venv/installed
WORKLOAD := build/workload.jsonl
OTHER_TRITON := 3.6.0
ARGS ?=

# Tests run as one process a core: torch must not start a thread pool in each.
test nightly: export OMP_NUM_THREADS = 1

.DEFAULT_GOAL := help
.PHONY: check test lint bench nightly docs peers help

check: $(INSTALLED)  ## the main job: every suite against the reference, then a replay of a small workload
	@echo "== refcache check: every suite against the reference, then the planted bugs"
	@$(BIN)/refcache check $(ARGS)
	@echo "== refcache replay: a synthetic workload through the serving loop, every step checked"
	@mkdir -p $(dir $(WORKLOAD))
	@$(BIN)/refcache workload $(WORKLOAD) --requests 100 --seed 0
	@$(BIN)/refcache replay $(WORKLOAD) --device-tokens 32768 --check every

test: $(INSTALLED)  ## the tests (ARGS="-k name" passes options to pytest)
	@echo "== pytest"
	@$(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist worksteal $(ARGS)

lint: $(INSTALLED)  ## ruff, mypy --strict and the import contracts
	@echo "== ruff, mypy, import-linter"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

bench: $(INSTALLED)  ## the CPU benchmarks
	@echo "== benchmarks"
	@$(BIN)/python -m pytest -q benchmarks --ignore=benchmarks/gpu $(ARGS)

nightly: $(INSTALLED)  ## the long campaigns, and the kernels on a second version of Triton
	@echo "== kernels on Triton $(OTHER_TRITON)"
	@test -d build/triton-$(OTHER_TRITON) || $(BIN)/python -m pip install -qq --no-deps \
	    --target build/triton-$(OTHER_TRITON) triton==$(OTHER_TRITON)
	@PYTHONPATH=build/triton-$(OTHER_TRITON) $(BIN)/python -m pytest -q -n auto --maxprocesses 8 \
	    tests/property/test_ops_*.py
	@echo "== long campaigns"
	@REFCACHE_FUZZ=2000 $(BIN)/python -m pytest -q -n auto --maxprocesses 8 tests/property/test_cli_fuzz.py tests/property/test_damaged_files.py
	@$(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist worksteal -m nightly $(ARGS)
	@echo "== every planted bug at five seeds, and every small program of the allocator and the tree"
	@$(BIN)/refcache planted --run --seeds 5
	@$(BIN)/refcache explore --scope allocator --scope tree --programs 200000 --workers 2

docs: $(INSTALLED)  ## the documentation, as HTML in docs/_build
	@echo "== sphinx"
	@$(BIN)/sphinx-build -q -W --keep-going docs docs/_build
	@echo "docs/_build/index.html"

peers: $(INSTALLED)  ## published releases of SGLang on trial: unpack their wheels, judge them
	@echo "== peers: unpacking releases"
	@$(BIN)/python scripts/peers.py unpack
	@echo "== peers: one row a release, suite and write policy"
	@$(BIN)/python scripts/peers.py verdicts $(ARGS)

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*##\(.*\)/make \1\t\2/p' Makefile

$(INSTALLED): pyproject.toml constraints.txt
	@for python in $(PYTHON); do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        found=$$python; break; \
	    fi; \
	done; \
	if [ -z "$$found" ]; then \
	    echo "refcache needs Python 3.11 or later; none of these is: $(PYTHON)." \
	        "Name one: make PYTHON=/path/to/python3.11" >&2; \
	    exit 1; \
	fi; \
	echo "== creating .venv with $$found and the versions of constraints.txt (a minute or two, 2 GB)"; \
	"$$found" -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@
