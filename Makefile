# setup   make .venv with everything that the targets below need
# demo    three environments collected with the shipped model, and what was recorded
# test    run all tests
# check   formatting, lint, types, and the direction of imports
# page    build the web page from viewer/ into the package
# bench   run the side-by-side measurements
# check-engines   the shipped model in real vLLM and SGLang, where they are installed
# check-gpu       token export from CUDA tensors, where there is a GPU
# check-backends  the gateway before servers that run: make check-backends BACKENDS="vllm:URL sglang:URL"

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TEST_ARGS ?= -n 2

.PHONY: help setup npm chromium demo test page check bench check-engines check-gpu check-backends clean

help:
	@sed -n 's/^# //p' Makefile

$(BIN)/python:
	$(PYTHON) -m venv .venv

# The plain install is enough for the demo; the tools of development come on top of it.
.venv/.installed: pyproject.toml | $(BIN)/python
	$(PIP) --editable .
	@touch $@

# verl asks for inference engines, which its types and its loss do without.
.venv/.installed-dev: .venv/.installed
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps 'verl==0.9.1'
	@touch $@

setup: .venv/.installed-dev

demo: .venv/.installed
	@$(BIN)/python -m examples.demo

# The tests run real agents, which npm brings; without it they are skipped, in CI they fail.
npm:
	@command -v npm >/dev/null || { apt-get update -qq && apt-get install -y -qq npm >/dev/null; } || true

# Pages are looked at in a real browser; the same holds for it.
chromium:
	@test -x /usr/bin/chromium || { apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } || true

test: setup npm chromium
	$(BIN)/python -m pytest $(TEST_ARGS)

page: npm
	cd viewer && npm ci && npm run build

check: setup
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python -m benchmarks

check-engines: setup
	$(BIN)/python tests/tiny/check_real_engines.py

check-gpu: setup
	$(BIN)/python tests/tokens/check_on_gpu.py

check-backends: setup
	$(BIN)/python tests/engines/check_real_backends.py $(BACKENDS)

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
