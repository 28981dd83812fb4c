# Everything a newcomer types. `make demo` and `make test` do all the set-up they need; CONTRIBUTING.md says what the
# other targets are for.
PYTHON ?= python3
BIN := .venv/bin
PIP := -m pip install --quiet --disable-pip-version-check
# The versions that the tests were last run with; `make constraints` takes the newest allowed versions instead.
CONSTRAINTS := constraints.txt
# The pins of trackio and Inspect AI clash with ours too (pillow, fsspec): only their tests look into this folder.
READERS := .venv-readers
# The page of `slime view` with uPlot, as wheels contain it: needs Node and npm. Without it the page's sources are served.
PAGE := plugins/runs/slime_runs/view
# .ci/run has failed tests run again: PYTEST=".venv/bin/python .ci/pytest_again.py".
PYTEST := $(BIN)/python -m pytest
# Many tests wait for processes that they have started: one worker more than there are cores.
WORKERS := $(shell $(PYTHON) -c "import os; print(1 + (os.cpu_count() or 1))")
# The pins of SGLang and vLLM clash with ours, and they are reached over HTTP: each has an environment of its own. One that
# SLIME_ENGINE_PYTHON (SGLang's) or VLLM_TEST_PYTHON names already is taken as it is.
NEEDS_SGLANG := $(if $(SLIME_ENGINE_PYTHON),,sglang)
NEEDS_VLLM := $(if $(VLLM_TEST_PYTHON),,vllm)
ENGINE_PYTHON := SLIME_ENGINE_PYTHON=$(or $(SLIME_ENGINE_PYTHON),$(CURDIR)/.venv-sglang/bin/python)
ENGINE_PYTHON += VLLM_TEST_PYTHON=$(or $(VLLM_TEST_PYTHON),$(CURDIR)/.venv-vllm/bin/python)
# What passed as a whole is a row of docs/reference/versions.md, if its versions are new: $(call RECORD,PART).
RECORD = $(if $(ARGS),,-p scripts.versions --record-versions $1)

.PHONY: release install constraints sglang vllm slurm view-assets browser screenshots demo demo-tools real test test-smoke test-readers test-backends lint types size docs site oracle benchmarks clean
install: .venv/.installed
sglang vllm: %: .venv-%/.installed
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

# About 3 GB and a few minutes each.
.venv-sglang/.installed .venv-vllm/.installed: .venv-%/.installed: plugins/engines/pyproject.toml constraints-%.txt
	test -x .venv-$*/bin/python || $(PYTHON) -m venv --upgrade-deps .venv-$*
	.venv-$*/bin/python $(PIP) $(if $(CONSTRAINTS),-c constraints-$*.txt) --group plugins/engines/pyproject.toml:$*-cpu
	.venv-$*/bin/python $(PIP) --no-deps --group plugins/engines/pyproject.toml:$*-cpu-no-deps
	touch $@

$(READERS)/.installed: .venv/.installed
	$(BIN)/python $(PIP) --no-deps --upgrade --target $(READERS) --group readers
	touch $@

.venv/.docs .venv/.release: .venv/.%: .venv/.installed
	$(BIN)/python $(PIP) $(CONSTRAINTS:%=-c %) --group $*
	touch $@

constraints:
	rm -rf .venv .venv-sglang .venv-vllm
	$(MAKE) install sglang vllm CONSTRAINTS=
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+.*//' > $(CONSTRAINTS)
	set -e; for engine in sglang vllm; do .venv-$$engine/bin/python -m pip freeze | sed 's/+.*//' > constraints-$$engine.txt; done

$(PAGE)/built/main.js: plugins/runs/package-lock.json $(wildcard $(PAGE)/page/*)
	npm ci --prefix plugins/runs --no-audit --no-fund --ignore-scripts
	npm run build --prefix plugins/runs

browser:
	command -v chromium || (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium)

# Daemons of Slurm, for the tests alone: they start their own.
slurm:
	command -v slurmctld || (apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge)

# Every page of a run at 390 and 1280 px, in light and dark, with the findings of axe-core.
screenshots: export SLIME_TEST_BROWSER := required
screenshots: install view-assets browser
	mkdir -p outputs/screenshots
	SLIME_TEST_VIEW_RUN=$(or $(RUN),outputs/demo) SLIME_TEST_SCREENSHOTS=$(CURDIR)/outputs/screenshots $(PYTEST) -k every_page tests/browser $(ARGS)

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
	$(PYTEST) -n $(WORKERS) --dist worksteal --durations=30 --ignore=tests/backends -m "not backends and not slow" $(call RECORD,quick) $(ARGS)
test-readers: install $(READERS)/.installed
	PYTHONPATH=$(CURDIR)/$(READERS) $(PYTEST) -k "trackio or inspect or collector" plugins/hooks/tests tests/integration/test_export.py $(ARGS)
# Two workers: each test may start several processes. Files that share a server or a cluster go to one of the two.
test-smoke: install $(NEEDS_SGLANG)
	$(ENGINE_PYTHON) $(PYTEST) -n 2 --dist loadgroup --durations=30 -m smoke tests/backends $(call RECORD,smoke) $(ARGS)
FOLDERS := vllm megatron ray kill slurm containers
PART_sglang := tests/backends $(patsubst %,--ignore=tests/backends/%,$(FOLDERS))
PART_slow := --ignore=tests/backends
test-backends: install $(if $(filter-out containers,$(PART)),,.venv/.release) $(if $(filter slurm,$(PART)),slurm) $(if $(filter vllm slurm containers,$(PART)),,$(NEEDS_SGLANG)) $(if $(filter-out vllm,$(PART)),,$(NEEDS_VLLM))
	$(if $(filter-out sglang slow $(FOLDERS),$(PART)),$(error PART=$(PART): one of sglang, slow, $(FOLDERS)))
	$(ENGINE_PYTHON) $(PYTEST) -n 2 --dist loadgroup --durations=30 -m "backends or slow" $(or $(PART_$(PART)),$(patsubst %,tests/backends/%,$(PART))) $(call RECORD,$(or $(PART),all)) $(ARGS)

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
site: .venv/.docs
	$(BIN)/python scripts/build_site.py $(ARGS)
release: .venv/.release view-assets
	$(BIN)/python scripts/release.py $(ARGS)
oracle: install
	$(BIN)/python scripts/oracle.py $(or $(BASE),$(error BASE=COMMIT: what to compare with)) $(CASES:%=--case %)
benchmarks: export BENCH_TABLE := benchmarks/table$(if $(DEVICE),-$(DEVICE)).md
benchmarks: install
	rm -f $(BENCH_TABLE)
	set -e; while read -r words; do echo "== $$words"; $(BIN)/python benchmarks/$$words $(ARGS) < /dev/null; done < $(BENCH_TABLE:benchmarks/table%.md=benchmarks/summary%.txt)
clean:
	rm -rf .venv .venv-sglang .venv-vllm $(READERS) outputs build docs/reference .pytest_cache .mypy_cache .ruff_cache .hypothesis
