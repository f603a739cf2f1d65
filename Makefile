# gradparity: every target sets up what it needs in .venv; a second run does not reinstall.
SHELL  := /bin/sh
PYTHON ?= $(shell command -v python3 || command -v python)
VENV   := .venv
BIN    := $(VENV)/bin
# What is installed in .venv: for training and judging; for the tests besides; and for all
# of them, trainers and scalers of others and the site too.
READY  := $(VENV)/.ready
READY_TEST := $(VENV)/.ready-test
READY_ALL := $(VENV)/.ready-all
# Gives mypy and the site a folder called gradparity, whatever the checkout is called.
TYPING := .typing/gradparity
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
REPORT := parity-report
BASELINE := ci/baselines/linux-cpu-gloo-torch2.13.jsonl
# One thread a rank; ranks are the parallelism here.
export OMP_NUM_THREADS ?= 1
# Where it is set, each of many processes would compile the same modules anew.
export PYTHONDONTWRITEBYTECODE =
# Two a core of a small machine: tests wait for half of their time.
WORKERS ?= 4
# The tests that need nothing but what setup-test installs, and that do not take long.
SELECT  ?= not slow and not extras

.PHONY: help dist parity site test test-all test-rest under-load lint ruff mypy pytest gate baseline planted bench report docs \
  survey-scalers specimens right-stacks survey torch-versions wild relock clean setup \
  setup-test setup-all mutants histories

parity: setup  ## the main job: train on meshes, compare every step on every rank
	$(BIN)/gradparity run --preset parity --scaler gradparity.scaler:GradScaler \
	  --scaler torch.amp:GradScaler --require gradparity.scaler:GradScaler --out $(REPORT)

help:  ## list the targets that users need
	@sed -n 's/^\(parity\|test\|test-all\|gate\|site\|dist\|bench\|help\):.*## /\1	/p' $(MAKEFILE_LIST) | expand -t 12

# mypy takes one core only: it runs beside the tests.
test: ruff  ## ruff, import-linter, mypy strict, pytest under xdist; nothing may be left behind
	$(MAKE) --no-print-directory -j 2 mypy pytest

test-all: test  ## the same, and then the slow tests and those of other packages
	$(MAKE) --no-print-directory test-rest

# mypy again: it sees more with the packages installed.
test-rest: setup-all
	$(MAKE) --no-print-directory -j 2 mypy pytest SELECT="slow or extras"

pytest: setup-test
	$(BIN)/python tests/nothing_left.py $(BIN)/pytest -n $(WORKERS) --dist worksteal -q -m "$(SELECT)"

under-load: setup-test  ## make test, RUNS times beside four busy loops
	$(BIN)/python tests/under_load.py $(or $(RUNS),3)

lint: ruff mypy

ruff: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

mypy: setup-test
	$(BIN)/mypy

gate: setup  ## what this repository asks of itself: fp32 on digits, the same on every machine
	$(BIN)/gradparity run --preset parity --model digits --precision fp32 --out $(REPORT)/gate --quiet; \
	  test $$? -le 1
	$(BIN)/gradparity gate $(REPORT)/gate/report.jsonl --baseline $(BASELINE)

baseline: setup  ## record the gate's baseline anew: two runs, the second for the noise
	for run in baseline baseline-again; do \
	  $(BIN)/gradparity run --preset parity --model digits --precision fp32 --out $(REPORT)/$$run --quiet || exit 1; \
	done
	$(BIN)/gradparity gate $(REPORT)/baseline/report.jsonl --baseline $(BASELINE) --update-baseline --yes \
	  --repeat $(REPORT)/baseline-again/report.jsonl

planted: setup-test  ## the gate on five copies of this tree with a regression each
	PLANTED=1 $(BIN)/pytest -q -rP tests/ci/test_planted.py

bench: setup-all  ## ratios against the peers, measured in the same run
	$(BIN)/gradparity bench scaler

histories: setup-test  ## draw call histories for MINUTES (10): docs/mutants.md
	HISTORY_MINUTES=$(or $(MINUTES),10) $(BIN)/pytest -n auto --dist worksteal -q -rP \
	  tests/scaler/test_histories.py -k TestOurs

specimens: setup-all  ## judge known faults of the field and write docs/specimens.md
	$(BIN)/python -m gradparity.benchmarks.specimens

right-stacks: setup-all  ## judge every right stack over five seeds: none may be accused
	$(BIN)/python -m gradparity.benchmarks.right_stacks --record --seeds $(or $(SEEDS),5)

survey: setup-all  ## judge the parallel plans of transformers; PLAN=ep: one of them, again
	mkdir -p $(REPORT)/survey
	test -z "$(PLAN)" || test -e $(REPORT)/survey/survey.jsonl || grep -v '"plan":"$(PLAN)"' \
	  benchmarks/results/survey-transformers.jsonl > $(REPORT)/survey/survey.jsonl
	$(BIN)/python -m gradparity.benchmarks.survey $(PLAN:%=--plan %) --out $(REPORT)/survey || \
	  case $$? in 1|3|4) ;; *) exit 1;; esac  # some wrong, without verdict, undecided
	cp $(REPORT)/survey/survey.jsonl benchmarks/results/survey-transformers.jsonl
	cp $(REPORT)/survey/transformers.md docs/wild/
	if test -d $(REPORT)/survey/findings; then \
	  cp $(REPORT)/survey/findings/*.py $(REPORT)/survey/findings/*.md docs/wild/ && \
	  cp $(REPORT)/survey/findings/*.json benchmarks/results/wild/; fi
	$(BIN)/python -m gradparity.benchmarks.wild --pages

wild: setup-all  ## run the scripts of docs/wild, record them and write its tables
	$(BIN)/python -m gradparity.benchmarks.wild

report: setup  ## render the last report again
	$(BIN)/gradparity report $(REPORT)/report.jsonl --html $(REPORT)

docs: setup  ## write the pages that are made from code
	$(BIN)/python -m gradparity.benchmarks.laws_page

site: setup-all  ## the documentation as a site: $(REPORT)/site/index.html
	$(BIN)/python -m gradparity.benchmarks.site $(REPORT)/site

mutants: setup  ## judge the judge: every faulty scaler against every law
	$(BIN)/gradparity mutants --preset quick $(MUTANTS) --out $(REPORT)/mutants

survey-scalers: setup-all  ## judge known scalers and write docs/known-scalers.md
	$(BIN)/python -m gradparity.benchmarks.survey_scalers --preset $(or $(PRESET),quick)

torch-versions: setup  ## one baseline over the torch of VENVS="DIR ...": docs/gate-tests.md
	$(BIN)/python -m gradparity.benchmarks.torch_versions $(addprefix --venv ,$(VENVS))

dist:  ## sdist and wheel in dist/, each installed into an empty environment and tried
	sh .ci/dist "$(PYTHON)"

relock: ## renew both constraints from pyproject.toml in a throw-away environment
	sh .ci/relock "$(PYTHON)"

clean:
	rm -rf $(VENV) $(REPORT) parity-peers build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

setup: $(READY)

setup-test: $(READY_TEST) $(TYPING)

setup-all: $(READY_ALL) $(TYPING)

# Not in git: a link to the folder above it sends tools that follow links in circles.
$(TYPING):
	mkdir -p $(@D)
	ln -s .. $@

# pyproject.toml and constraints.txt decide what is installed: newer than the stamp, install again.
$(READY): pyproject.toml constraints.txt
	@echo "installing torch, numpy and a few small packages into $(VENV): a minute or two"
	"$(PYTHON)" -m venv $(VENV)
	$(PIP) --upgrade 'setuptools>=77'
	$(PIP) --no-build-isolation -e .
	@touch $@

$(READY_TEST): $(READY)
	@echo "installing pytest, mypy, ruff and what else the tests need: half a minute"
	$(PIP) --no-build-isolation -e '.[test]'
	@touch $@

# deepspeed's setup.py imports torch: it comes after it.
$(READY_ALL): $(READY_TEST) constraints-all.txt .ci/alone.txt
	@echo "installing the site, trainers and scalers of others: two minutes or more"
	$(PIP) -c constraints-all.txt --upgrade wheel
	$(PIP) -c constraints-all.txt --no-build-isolation -e '.[test,site,peers,stacks]'
	$(PIP) -c constraints-all.txt --no-deps -r .ci/alone.txt
	@touch $@
