# gradparity: every target sets up what it needs in .venv; a second run does not reinstall.
SHELL  := /bin/sh
PYTHON ?= $(shell command -v python3 || command -v python)
VENV   := .venv
BIN    := $(VENV)/bin
# What is installed in .venv: for training and comparing; for the tests as well; and for all
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
# Four for two cores: tests wait for ranks. Three took 380 s in place of 364, as many CPU seconds.
WORKERS ?= 4
# The tests that need nothing but what setup-test installs, and that do not take long.
SELECT  ?= not slow and not extras

.PHONY: parity test test-all test-rest gate site dist bench help \
  ruff mypy pytest setup setup-test setup-all

parity: setup  ## the main job: train on meshes, compare every step on every rank
	$(BIN)/gradparity run --preset parity --scaler gradparity.scaler:GradScaler \
	  --scaler torch.amp:GradScaler --require gradparity.scaler:GradScaler --out $(REPORT)

# mypy takes one core only: it runs beside the tests.
test: ruff  ## ruff, import-linter, mypy strict, pytest under xdist; nothing may be left behind
	$(MAKE) --no-print-directory -j 2 mypy pytest

test-all: test  ## the same, and then the slow tests and those of other packages
	$(MAKE) --no-print-directory test-rest

# mypy again: it sees more with the packages installed.
test-rest: setup-all
	$(MAKE) --no-print-directory -j 2 mypy pytest SELECT="slow or extras"

gate: setup  ## what this repository asks of itself: fp32 on digits, the same on every machine
	$(BIN)/gradparity run --preset parity --model digits --precision fp32 --out $(REPORT)/gate --quiet; \
	  test $$? -le 1
	$(BIN)/gradparity gate $(REPORT)/gate/report.jsonl --baseline $(BASELINE)

site: setup-all  ## the documentation as a site: $(REPORT)/site/index.html
	$(BIN)/gradparity bench site $(REPORT)/site

dist:  ## sdist and wheel in dist/, each installed into an empty environment and tried
	sh .ci/dist "$(PYTHON)"

bench: setup-all  ## the scaler beside torch's, in the same run; gradparity bench lists all tools
	$(BIN)/gradparity bench scaler

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' $(MAKEFILE_LIST) | expand -t 12

ruff: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

mypy: setup-test
	$(BIN)/mypy

pytest: setup-test
	$(BIN)/python tests/nothing_left.py $(BIN)/pytest -n $(WORKERS) --dist worksteal -q -m "$(SELECT)"

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
