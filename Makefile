# Everything a newcomer types. `make demo` and `make test` do all the set-up they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What the demo needs, and what the tests need besides: Megatron-core, Ray, tools of development.
DEMO_STAMP := $(VENV)/.demo
STAMP := $(VENV)/.installed
# The versions that the tests were last run with; `make constraints` takes the newest ones that are allowed instead.
CONSTRAINTS := constraints.txt
SGLANG_CONSTRAINTS := constraints-sglang.txt
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
# SGLang's pins clash with ours, and it is reached over HTTP: it has an environment of its own.
SGLANG_VENV := .venv-sglang
SGLANG_BIN := $(SGLANG_VENV)/bin
SGLANG_STAMP := $(SGLANG_VENV)/.installed
# The pins of trackio and Inspect AI clash with ours too (pillow, fsspec): they lie, with what of theirs we lack, in a
# folder that only their tests look into.
READERS := .venv-readers
SGLANG_NEEDS := $(addprefix plugins/engines/sglang/slime_engine_sglang/,requirements-cpu.txt requirements-cpu-no-deps.txt)

# .ci/run has failed tests run again: PYTEST=".venv/bin/python .ci/pytest_again.py".
PYTEST := $(BIN)/python -m pytest
# An environment that SLIME_ENGINE_PYTHON names already is taken as it is.
NEEDS_SGLANG := $(if $(SLIME_ENGINE_PYTHON),,sglang)
ENGINE_PYTHON := SLIME_ENGINE_PYTHON=$(or $(SLIME_ENGINE_PYTHON),$(CURDIR)/$(SGLANG_BIN)/python)

.PHONY: install constraints sglang view-assets view-screenshots browser demo demo-tools test test-smoke test-backends test-readers lint types size docs oracle benchmarks clean

install: $(STAMP)

# torch first and pinned: a looser requirement may pull gigabytes of CUDA libraries.
$(DEMO_STAMP): pyproject.toml $(CONSTRAINTS) requirements.txt compat/pyproject.toml plugins/pyproject.toml $(wildcard plugins/*/pyproject.toml plugins/*/*/pyproject.toml)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) --upgrade pip
	$(BIN)/python $(PIP_INSTALL) torch==2.13.0
	$(BIN)/python $(PIP_INSTALL) $(CONSTRAINTS:%=-c %) "hatchling>=1.27" "editables>=0.5"
	$(BIN)/python $(PIP_INSTALL) --no-build-isolation $(CONSTRAINTS:%=-c %) -r requirements.txt
	touch $(DEMO_STAMP)

$(STAMP): $(DEMO_STAMP) requirements-dev.txt
	$(BIN)/python $(PIP_INSTALL) --no-build-isolation $(CONSTRAINTS:%=-c %) -r requirements-dev.txt
	touch $(STAMP)

constraints:
	rm -rf $(VENV) $(SGLANG_VENV)
	$(MAKE) install sglang CONSTRAINTS= SGLANG_CONSTRAINTS=
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+.*//' > $(CONSTRAINTS)
	$(SGLANG_BIN)/python -m pip freeze | sed 's/+.*//' > $(SGLANG_CONSTRAINTS)

# About 3 GB and a few minutes.
sglang: $(SGLANG_STAMP)

$(SGLANG_STAMP): $(SGLANG_NEEDS) $(SGLANG_CONSTRAINTS)
	test -x $(SGLANG_BIN)/python || $(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_BIN)/python $(PIP_INSTALL) --upgrade pip
	$(SGLANG_BIN)/python $(PIP_INSTALL) torch==2.13.0
	$(SGLANG_BIN)/python $(PIP_INSTALL) $(SGLANG_CONSTRAINTS:%=-c %) -r $(word 1,$(SGLANG_NEEDS))
	$(SGLANG_BIN)/python $(PIP_INSTALL) --no-deps -r $(word 2,$(SGLANG_NEEDS))
	touch $(SGLANG_STAMP)

$(READERS)/.installed: $(STAMP) requirements-readers.txt
	$(BIN)/python $(PIP_INSTALL) --no-deps --upgrade --target $(READERS) -r requirements-readers.txt
	touch $@

# The page of `slime view` with uPlot, as wheels contain it: needs Node and npm. Without it the page's sources are served.
VIEW := plugins/runs
VIEW_BUILT := $(VIEW)/slime_runs/view/built/main.js

view-assets: $(VIEW_BUILT)

$(VIEW_BUILT): $(VIEW)/package-lock.json $(wildcard $(VIEW)/slime_runs/view/page/*)
	npm ci --prefix $(VIEW) --no-audit --no-fund --ignore-scripts
	npm run build --prefix $(VIEW)

# Chromium for tests/browser, where Debian's packages may be installed.
browser:
	command -v chromium || (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium)

# The pictures of docs/how-to/look-at-a-run.md, of the demo's run.
view-screenshots: install view-assets
	mkdir -p docs/images/view
	SLIME_TEST_BROWSER=required SLIME_TEST_VIEW_RUN=outputs/demo SLIME_TEST_SCREENSHOTS=docs/images/view \
		$(PYTEST) -q tests/browser/test_view.py -k "every_page"

demo: $(DEMO_STAMP) demo.yaml
	$(BIN)/slime train --config demo.yaml $(ARGS)

demo-tools: $(DEMO_STAMP) tools.yaml
	$(BIN)/slime train --config tools.yaml $(ARGS)

demo.yaml tools.yaml: | $(DEMO_STAMP)
	$(BIN)/slime init $(@:.yaml=) $@

# A process of the tests has one small thing to do: more threads, and code compiled for it, cost more than they bring.
test: export OMP_NUM_THREADS := 1
test: export TORCH_COMPILE_DISABLE := 1
# Where Python is told to keep no compiled modules, every process compiles the whole of slime_core again.
test test-smoke test-backends: export PYTHONDONTWRITEBYTECODE :=

test: install
	$(PYTEST) -n auto --dist worksteal --durations=30 --ignore=tests/backends -m "not backends and not slow" $(ARGS)

# Files that share a server or a cluster go to one of the two workers (tests/conftest.py): each test may start several
# processes, so more cores need no more workers.
test-smoke: install $(NEEDS_SGLANG)
	$(ENGINE_PYTHON) $(PYTEST) -n 2 --dist loadgroup --durations=30 -m smoke tests/backends $(ARGS)

# trackio, logs for Inspect AI and traces for OpenTelemetry, taken by the real libraries and a real collector (Rotel).
test-readers: export OMP_NUM_THREADS := 1
test-readers: export TORCH_COMPILE_DISABLE := 1
test-readers: install $(READERS)/.installed
	PYTHONPATH=$(CURDIR)/$(READERS) $(PYTEST) -k "trackio or inspect or collector" plugins/hooks/tests tests/integration/test_export.py $(ARGS)

# The whole, or one part of it: make test-backends PART=ray
PARTS_sglang := tests/backends $(patsubst %,--ignore=tests/backends/%,megatron ray kill)
PARTS_megatron := tests/backends/megatron
PARTS_ray := tests/backends/ray
PARTS_kill := tests/backends/kill
PARTS_slow := --ignore=tests/backends
CHOSEN = $(if $(PART),$(or $(PARTS_$(PART)),$(error PART=$(PART): one of sglang, megatron, ray, kill, slow)))

test-backends: install $(NEEDS_SGLANG)
	$(ENGINE_PYTHON) $(PYTEST) -n 2 --dist loadgroup --durations=30 -m "backends or slow" $(CHOSEN) $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --config pyproject.toml
	$(BIN)/python scripts/prose.py --check

types: install
	$(BIN)/mypy

size: install
	$(BIN)/python scripts/size.py --demo

# Builds docs/reference, and holds the hand-written pages to the code.
docs: install
	$(BIN)/python scripts/generate_docs.py
	$(BIN)/python scripts/generate_models.py --check
	$(PYTEST) -q tests/docs/test_pages.py tests/docs/test_promised_forms.py tests/unit/plugins/test_docs.py

# The code of a commit and of this checkout, run side by side: make oracle BASE=main CASES="demo ppo", or CASES=all
oracle: install
	$(BIN)/python scripts/oracle.py $(or $(BASE),$(error BASE=COMMIT: what to compare with)) $(CASES:%=--case %)

# The commands of benchmarks/summary.txt, on a machine with nothing else to do; their ratios become benchmarks/table.md.
# TRL_PYTHON=PATH names the environment of end_to_end.py (benchmarks/README.md). DEVICE=cuda: those
# of summary-cuda.txt, of which the first says what is missing.
OF_DEVICE := $(if $(DEVICE),-$(DEVICE))
benchmarks: export BENCH_TABLE := benchmarks/table$(OF_DEVICE).md
benchmarks: install
	rm -f $(BENCH_TABLE)
	set -e; while read -r words; do echo "== $$words"; \
	    $(BIN)/python benchmarks/$$words $(ARGS) < /dev/null; done < benchmarks/summary$(OF_DEVICE).txt

clean:
	rm -rf $(VENV) $(SGLANG_VENV) outputs .pytest_cache .mypy_cache .ruff_cache .hypothesis
