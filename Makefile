# Everything a newcomer types, with all the set-up it needs; CONTRIBUTING.md says what each target is for.
PYTHON ?= python3
BIN := .venv/bin
PIP := -m pip install --quiet --disable-pip-version-check
# The versions that the tests were last run with; `make constraints` takes the newest allowed versions instead.
CONSTRAINTS := constraints.txt
# The page of `slime view` with uPlot, as wheels contain it: needs Node and npm. Without it the page's sources are served.
PAGE := plugins/runs/slime_runs/view
# .ci/run has failed tests run again: PYTEST=".venv/bin/python .ci/pytest_again.py".
PYTEST := $(BIN)/python -m pytest
# Many tests wait for processes that they have started: one worker more than there are cores.
WORKERS := $(shell $(PYTHON) -c "import os; print(1 + (os.cpu_count() or 1))")
# A process of the tests has one small thing to do: more threads, and code compiled for it, cost more than they bring.
# Where Python is told to keep no compiled modules, every process compiles the whole of slime_core again.
QUICK := OMP_NUM_THREADS=1 TORCH_COMPILE_DISABLE=1 PYTHONDONTWRITEBYTECODE=
# An interpreter of SGLang or vLLM that the environment names is taken as it is; else `make sglang vllm` makes one.
NEEDS_SGLANG := $(if $(SLIME_ENGINE_PYTHON),,sglang)
NEEDS_VLLM := $(if $(VLLM_TEST_PYTHON),,vllm)
ENGINES := SLIME_ENGINE_PYTHON=$(or $(SLIME_ENGINE_PYTHON),$(CURDIR)/.venv-sglang/bin/python)
ENGINES += VLLM_TEST_PYTHON=$(or $(VLLM_TEST_PYTHON),$(CURDIR)/.venv-vllm/bin/python) PYTHONDONTWRITEBYTECODE=
# What passed as a whole is a row of docs/reference/versions.md, if its versions are new: $(call RECORD,PART).
RECORD = $(if $(ARGS),,-p scripts.versions --record-versions $1)

.PHONY: release install constraints sglang vllm slurm view-assets browser screenshots demo demo-tools real test test-smoke test-readers test-backends lint types size docs site oracle benchmarks clean
install: .venv/.dev
sglang vllm: %: .venv-%/.installed
view-assets: $(PAGE)/built/main.js

# hatchling and editables first: the packages are built in this environment, so that no other torch is downloaded.
.venv/.demo: $(CONSTRAINTS) requirements.txt $(wildcard pyproject.toml */pyproject.toml plugins/*/pyproject.toml plugins/*/*/pyproject.toml)
	test -x $(BIN)/python || $(PYTHON) -m venv --upgrade-deps .venv
	$(BIN)/python $(PIP) $(CONSTRAINTS:%=-c %) "hatchling>=1.27" "editables>=0.5"
	$(BIN)/python $(PIP) --no-build-isolation $(CONSTRAINTS:%=-c %) -r requirements.txt
	touch $@
.venv/.docs .venv/.release: .venv/.dev
.venv/.dev .venv/.docs .venv/.release: .venv/.%: .venv/.demo
	$(BIN)/python $(PIP) $(CONSTRAINTS:%=-c %) --group $*
	touch $@

# Programs whose pins clash with ours: engines, reached over HTTP (3 GB each), and readers of what slime writes.
.venv-sglang/.installed .venv-vllm/.installed: .venv-%/.installed: plugins/engines/pyproject.toml constraints-%.txt
	test -x .venv-$*/bin/python || $(PYTHON) -m venv --upgrade-deps .venv-$*
	.venv-$*/bin/python $(PIP) $(if $(CONSTRAINTS),-c constraints-$*.txt) --group plugins/engines/pyproject.toml:$*-cpu
	.venv-$*/bin/python $(PIP) --no-deps --group plugins/engines/pyproject.toml:$*-cpu-no-deps
	touch $@
.venv-readers/.installed: .venv/.dev
	$(BIN)/python $(PIP) --no-deps --upgrade --target $(@D) --group readers
	touch $@
constraints:
	rm -rf .venv .venv-sglang .venv-vllm
	$(MAKE) install sglang vllm CONSTRAINTS=
	set -e; for of in "" -sglang -vllm; do .venv$$of/bin/python -m pip freeze --exclude-editable | sed 's/+.*//' > constraints$$of.txt; done

$(PAGE)/built/main.js: plugins/runs/package-lock.json $(wildcard $(PAGE)/page/*)
	npm ci --prefix plugins/runs --no-audit --no-fund --ignore-scripts
	npm run build --prefix plugins/runs

# Packages of Debian, the first of which is named after its program. The tests start Slurm's daemons.
browser: APT := chromium
slurm: APT := slurmctld slurmd slurm-client munge
browser slurm:
	command -v $(firstword $(APT)) || (apt-get update -qq && apt-get install -y -qq --no-install-recommends $(APT))

demo: FILE := demo
demo-tools: FILE := tools
real: FILE := smollm2
demo demo-tools real: .venv/.demo
	test -e $(FILE).yaml || $(BIN)/slime init $(FILE) $(FILE).yaml
	$(BIN)/slime train --config $(FILE).yaml $(ARGS)

test: install
	$(QUICK) $(PYTEST) -n $(WORKERS) --dist worksteal --durations=30 --ignore=tests/backends -m "not backends and not slow" $(call RECORD,quick) $(ARGS)
test-readers: install .venv-readers/.installed
	$(QUICK) PYTHONPATH=$(CURDIR)/.venv-readers $(PYTEST) -k "trackio or inspect or collector" plugins/hooks/tests tests/integration/test_export.py $(ARGS)
screenshots: install view-assets browser
	SLIME_TEST_BROWSER=required SLIME_TEST_VIEW_RUN=$(or $(RUN),outputs/demo) SLIME_TEST_SCREENSHOTS=$(CURDIR)/outputs/screenshots $(PYTEST) -k every_page tests/browser $(ARGS)
# Two workers: each test may start several processes. Files that share a server or a cluster go to one of the two.
test-smoke: install $(NEEDS_SGLANG)
	$(ENGINES) $(PYTEST) -n 2 --dist loadgroup --durations=30 -m smoke tests/backends $(call RECORD,smoke) $(ARGS)
PARTS := sglang slow vllm megatron ray kill slurm containers
$(if $(filter-out $(PARTS),$(PART)),$(error PART=$(PART): one of $(PARTS)))
PART_sglang := tests/backends $(patsubst %,--ignore=tests/backends/%,$(filter-out sglang slow,$(PARTS)))
PART_slow := --ignore=tests/backends
test-backends: install $(if $(filter-out containers,$(PART)),,.venv/.release) $(if $(filter slurm,$(PART)),slurm) $(if $(filter vllm slurm containers,$(PART)),,$(NEEDS_SGLANG)) $(if $(filter-out vllm,$(PART)),,$(NEEDS_VLLM))
	$(ENGINES) $(PYTEST) -n 2 --dist loadgroup --durations=30 -m "backends or slow" $(or $(PART_$(PART)),$(PART:%=tests/backends/%)) $(call RECORD,$(or $(PART),all)) $(ARGS)

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
	$(PYTEST) -q tests/docs/test_pages.py tests/docs/test_promised_forms.py tests/unit/plugins/test_docs.py
site: .venv/.docs
	$(BIN)/python scripts/build_site.py $(ARGS)
release: .venv/.release view-assets
	$(BIN)/python scripts/release.py $(ARGS)
oracle: install
	$(BIN)/python scripts/oracle.py $(or $(BASE),$(error BASE=COMMIT: what to compare with)) $(CASES:%=--case %)
benchmarks: install
	$(BIN)/python benchmarks/summary.py $(DEVICE:%=--device %) $(ARGS)
clean:
	rm -rf .venv .venv-sglang .venv-vllm .venv-readers outputs build docs/reference .pytest_cache .mypy_cache .ruff_cache .hypothesis
