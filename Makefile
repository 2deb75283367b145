# setup           make .venv with everything that the targets below need
# demo            train the shipped model for six steps, and show what was recorded: rolltape demo
# demo-train      the shipped model learns while another process collects ahead of it, with the reward on the page
# test            run all tests
# test-fast       run the tests that need no agents, browser, npm, containers, Ray or torch: about two minutes on two cores
# test-release    what a release needs beyond make test; docs/architecture.md lists it
# check           formatting, lint, types, and the direction of imports
# docs            build the documentation into site/
# page            build the web page from viewer/ into the package
# release-check   build wheel and sdist into dist/ and check them; write the SBOM and the licenses of dependencies
# test-pythons    fast tests on each Python from 3.11 to 3.13 that is found: make test-pythons PYTHONS="3.13"
# test-lowest     the same tests with the lowest versions of dependencies
# lock            write the installed versions to constraints-dev.txt
# bench           run the benchmarks and write benchmarks/RESULTS.md: make bench BENCH="view --rollouts 2000"
# check-engines   the shipped model in real vLLM and SGLang, where they are installed
# check-gpu       token export from CUDA tensors, where there is a GPU
# check-skyrl     the generator for SkyRL with SkyRL itself, in an environment of its own
# check-backends  the gateway with running servers: make check-backends BACKENDS="vllm:URL sglang:URL"
# clean           remove .venv, build outputs and caches

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TEST_ARGS ?= -n 2
# make setup LOCKED=1: the versions in constraints-dev.txt, instead of the newest.
CONSTRAINTS := $(if $(LOCKED),-c constraints-dev.txt)

.PHONY: help setup npm chromium bwrap podman systemd demo demo-train test test-fast test-release page docs check release-check test-pythons test-lowest lock bench check-engines check-gpu check-skyrl check-backends clean

help:
	@sed -n '/^#/!q; s/^# //p' Makefile

$(BIN)/python:
	$(PYTHON) -m venv .venv

# The plain install is enough for the demo; the tools of development come on top of it.
.venv/.installed: pyproject.toml | $(BIN)/python
	$(PIP) $(CONSTRAINTS) --editable .
	@touch $@

.venv/.installed-training: .venv/.installed
	$(PIP) $(CONSTRAINTS) --editable '.[training]'
	@touch $@

# verl asks for inference engines, which its types and its loss do without; xgrammar asks for triton, which its grammars do
# without; verifiers asks for an older openai, openenv-core for a user interface.
.venv/.installed-dev: .venv/.installed
	$(PIP) $(CONSTRAINTS) --editable '.[dev]'
	$(PIP) --no-deps 'openenv-core==0.3.0' 'verifiers==0.4.0' 'verl==0.9.1' 'xgrammar==0.2.8' 'apache-tvm-ffi==0.1.15.post2'
	@touch $@

setup: .venv/.installed-dev

demo: .venv/.installed
	@$(BIN)/rolltape demo

demo-train: .venv/.installed-training
	@rm -rf runs/demo-train
	@$(BIN)/python -m examples.train_async --run runs/demo-train --page

# The tests run real agents, which npm brings; without it they are skipped, in CI they fail.
npm:
	@command -v npm >/dev/null || { apt-get update -qq && apt-get install -y -qq npm >/dev/null; } || true

# Pages are looked at in a real browser; the same holds for it.
chromium:
	@test -x /usr/bin/chromium || { apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } || true

# Agents are run in its sandbox; the same holds for it.
bwrap:
	@command -v bwrap >/dev/null || { apt-get update -qq && apt-get install -y -qq bubblewrap >/dev/null; } || true

# Containers likewise. Tests make their image of this machine's own programs. podman-compose needs aardvark-dns and iptables.
podman:
	@command -v podman >/dev/null && command -v runc >/dev/null && test -x /usr/lib/podman/aardvark-dns && test -x /usr/sbin/iptables || { apt-get update -qq && apt-get install -y -qq --no-install-recommends podman runc catatonit netavark aardvark-dns iptables >/dev/null; } || true

# The unit of deploy/ is checked by it.
systemd:
	@command -v systemd-analyze >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends systemd >/dev/null; } || true

test: setup npm chromium bwrap podman systemd
	$(BIN)/python -m pytest $(TEST_ARGS)

test-fast: setup bwrap
	$(BIN)/python -m pytest --fast $(TEST_ARGS)

test-release: setup npm chromium bwrap podman systemd
	for time in 1 2 3; do $(BIN)/python -m pytest $(TEST_ARGS) || exit; done
	$(BIN)/python tests/under_load.py 20 tests/view tests/tracking tests/groups tests/tape tests/gateway/test_gateway_process.py
	ROLLTAPE_SEEDS=100 $(BIN)/python -m pytest $(TEST_ARGS) tests/tape/test_index_follows.py
	ROLLTAPE_SEEDS=40 $(BIN)/python -m pytest $(TEST_ARGS) tests/gateway/test_gateway_random_turns.py
	ROLLTAPE_EXAMPLES=2000 $(BIN)/python -m pytest $(TEST_ARGS) tests/test_properties*.py tests/export/test_properties.py
	ROLLTAPE_CONTAINERS=200 $(BIN)/python -m pytest --timeout 0 tests/collect/test_container_agents.py -k killed_five_times
	ROLLTAPE_KILLS=1000 $(BIN)/python -m pytest --timeout 0 tests/gateway/test_gateway_kill_loop.py
	$(BIN)/python -m benchmarks gateway --part soak --strict
	$(BIN)/python tests/integrations/check_trl_ranks.py
	$(MAKE) check-skyrl check-engines check-gpu

docs: setup
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/python -m mkdocs build --strict --quiet
	@echo 'site/index.html; its search needs a server: $(BIN)/python -m http.server --directory site --bind 127.0.0.1'

page: npm
	cd viewer && npm ci && npm run build

check: setup
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

# What a release is built and described with stays apart from what it is tested with.
.venv-release/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet --disable-pip-version-check --editable . \
		'hatchling>=1.27' 'twine>=6' 'cyclonedx-bom>=7'
	@touch $@

test-pythons:
	$(PYTHON) tests/release/check_pythons.py $(PYTHONS)

test-lowest:
	$(PYTHON) tests/release/check_pythons.py --lowest

# Names and versions alone, so that it says nothing about where packages come from.
lock: setup
	@echo '# The versions that development and CI last ran with. make lock writes it; make setup LOCKED=1 installs them.' > constraints-dev.txt
	@$(BIN)/python -m pip freeze --exclude-editable | sed -n 's/^\([A-Za-z0-9._-]*==[A-Za-z0-9._!]*\).*/\1/p' >> constraints-dev.txt

release-check: .venv-release/.installed
	PYTHONPATH=tests .venv-release/bin/python tests/release/check_release.py

bench: setup
	$(BIN)/python -m benchmarks $(BENCH) --write benchmarks

check-engines: setup
	$(BIN)/python tests/tiny/check_real_engines.py

check-gpu: setup
	$(BIN)/python tests/tokens/check_on_gpu.py

# SkyRL pins versions that others do not take, and asks for what needs a GPU to be built; its types and its client do without.
.venv-skyrl/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-skyrl
	.venv-skyrl/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[training]' hypothesis pytest \
		'ray==2.56.0' 'transformers>=5.6.1,<=5.8.0' 'hydra-core==1.3.2' 'peft==0.18.1' \
		datasets func_timeout jaxtyping loguru omegaconf tensordict torchdata
	.venv-skyrl/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'skyrl==0.3.0' 'skyrl-gym==0.4.0'
	@touch $@

check-skyrl: .venv-skyrl/.installed
	ROLLTAPE_SKYRL=installed .venv-skyrl/bin/python -m pytest tests/integrations/test_skyrl.py

check-backends: setup
	$(BIN)/python tests/engines/check_real_backends.py $(BACKENDS)

clean:
	rm -rf .venv .venv-skyrl .venv-release .venv-lowest .venv-3.* build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
