# Everything a newcomer types. `make demo` and `make test` do all the set-up they need; CONTRIBUTING.md says what the
# other targets are for.
PYTHON ?= python3
BIN := .venv/bin
PIP := -m pip install --quiet --disable-pip-version-check
# The versions that the tests were last run with; `make constraints` takes the newest allowed versions instead.
CONSTRAINTS := constraints.txt
SGLANG_CONSTRAINTS := constraints-sglang.txt
# SGLang's pins clash with ours, and it is reached over HTTP: it has an environment of its own.
SGLANG_BIN := .venv-sglang/bin
SGLANG_PROJECT := plugins/engines/sglang/pyproject.toml
# The pins of trackio and Inspect AI clash with ours too (pillow, fsspec): only their tests look into this folder.
READERS := .venv-readers
# The page of `slime view` with uPlot, as wheels contain it: needs Node and npm. Without it the page's sources are served.
PAGE := plugins/runs/slime_runs/view
# .ci/run has failed tests run again: PYTEST=".venv/bin/python .ci/pytest_again.py".
PYTEST := $(BIN)/python -m pytest
# An environment that SLIME_ENGINE_PYTHON names already is taken as it is.
NEEDS_SGLANG := $(if $(SLIME_ENGINE_PYTHON),,sglang)
ENGINE_PYTHON := SLIME_ENGINE_PYTHON=$(or $(SLIME_ENGINE_PYTHON),$(CURDIR)/$(SGLANG_BIN)/python)

.PHONY: install constraints sglang view-assets browser demo demo-tools real test test-smoke test-readers test-backends lint types size docs oracle benchmarks clean
install: .venv/.installed
sglang: .venv-sglang/.installed
view-assets: $(PAGE)/built/main.js

# hatchling and editables first: the packages are built in this environment, so that no other torch is downloaded.
.venv/.demo: $(CONSTRAINTS) requirements.txt $(wildcard pyproject.toml */pyproject.toml plugins/*/pyproject.toml plugins/*/*/pyproject.toml)
	test -x $(BIN)/python || $(PYTHON) -m venv --upgrade-deps .venv
	$(BIN)/python $(PIP) $(CONSTRAINTS:%=-c %) "hatchling>=1.27" "editables>=0.5"
	$(BIN)/python $(PIP) --no-build-isolation $(CONSTRAINTS:%=-c %) -r requirements.txt
	touch $@

.venv/.installed: .venv/.demo
	$(BIN)/python $(PIP) --no-build-isolation $(CONSTRAINTS:%=-c %) -r requirements.txt --group dev
	touch $@

# About 3 GB and a few minutes.
.venv-sglang/.installed: $(SGLANG_PROJECT) $(SGLANG_CONSTRAINTS)
	test -x $(SGLANG_BIN)/python || $(PYTHON) -m venv --upgrade-deps .venv-sglang
	$(SGLANG_BIN)/python $(PIP) $(SGLANG_CONSTRAINTS:%=-c %) --group $(SGLANG_PROJECT):cpu
	$(SGLANG_BIN)/python $(PIP) --no-deps --group $(SGLANG_PROJECT):cpu-no-deps
	touch $@

$(READERS)/.installed: .venv/.installed
	$(BIN)/python $(PIP) --no-deps --upgrade --target $(READERS) --group readers
	touch $@

constraints:
	rm -rf .venv .venv-sglang
	$(MAKE) install sglang CONSTRAINTS= SGLANG_CONSTRAINTS=
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+.*//' > $(CONSTRAINTS)
	$(SGLANG_BIN)/python -m pip freeze | sed 's/+.*//' > $(SGLANG_CONSTRAINTS)

$(PAGE)/built/main.js: plugins/runs/package-lock.json $(wildcard $(PAGE)/page/*)
	npm ci --prefix plugins/runs --no-audit --no-fund --ignore-scripts
	npm run build --prefix plugins/runs

browser:
	command -v chromium || (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium)

demo: demo.yaml
demo-tools: tools.yaml
real: smollm2.yaml
demo demo-tools real: .venv/.demo
	$(BIN)/slime train --config $(filter %.yaml,$^) $(ARGS)
demo.yaml tools.yaml smollm2.yaml: | .venv/.demo
	$(BIN)/slime init $(@:.yaml=) $@

# A process of the tests has one small thing to do: more threads, and code compiled for it, cost more than they bring.
test test-readers: export OMP_NUM_THREADS := 1
test test-readers: export TORCH_COMPILE_DISABLE := 1
# Where Python is told to keep no compiled modules, every process compiles the whole of slime_core again.
test test-smoke test-backends: export PYTHONDONTWRITEBYTECODE :=

test: install
	$(PYTEST) -n auto --dist worksteal --durations=30 --ignore=tests/backends -m "not backends and not slow" $(ARGS)
test-readers: install $(READERS)/.installed
	PYTHONPATH=$(CURDIR)/$(READERS) $(PYTEST) -k "trackio or inspect or collector" plugins/hooks/tests tests/integration/test_export.py $(ARGS)
# Two workers: each test may start several processes. Files that share a server or a cluster go to one of the two.
test-smoke: install $(NEEDS_SGLANG)
	$(ENGINE_PYTHON) $(PYTEST) -n 2 --dist loadgroup --durations=30 -m smoke tests/backends $(ARGS)
PART_sglang := tests/backends $(patsubst %,--ignore=tests/backends/%,megatron ray kill)
PART_slow := --ignore=tests/backends
test-backends: install $(NEEDS_SGLANG)
	$(if $(filter-out sglang megatron ray kill slow,$(PART)),$(error PART=$(PART): one of sglang, megatron, ray, kill, slow))
	$(ENGINE_PYTHON) $(PYTEST) -n 2 --dist loadgroup --durations=30 -m "backends or slow" $(or $(PART_$(PART)),$(patsubst %,tests/backends/%,$(PART))) $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --config pyproject.toml
	$(BIN)/python scripts/prose.py --check
types: install
	$(BIN)/mypy
size: install
	$(BIN)/python scripts/size.py --demo
docs: install
	$(BIN)/python scripts/generate_docs.py
	$(BIN)/python scripts/generate_models.py --check
	$(PYTEST) -q tests/docs/test_pages.py tests/docs/test_promised_forms.py tests/unit/plugins/test_docs.py
oracle: install
	$(BIN)/python scripts/oracle.py $(or $(BASE),$(error BASE=COMMIT: what to compare with)) $(CASES:%=--case %)
benchmarks: export BENCH_TABLE := benchmarks/table$(if $(DEVICE),-$(DEVICE)).md
benchmarks: install
	rm -f $(BENCH_TABLE)
	set -e; while read -r words; do echo "== $$words"; $(BIN)/python benchmarks/$$words $(ARGS) < /dev/null; done < $(BENCH_TABLE:benchmarks/table%.md=benchmarks/summary%.txt)
clean:
	rm -rf .venv .venv-sglang $(READERS) outputs docs/reference .pytest_cache .mypy_cache .ruff_cache .hypothesis
