# make forge, make test: each sets up what it needs, then runs.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

VENV ?= .venv
# Empty: the newest Python from 3.11 to 3.13 that is found.
PYTHON ?=
WORKDIR ?= workdir/forge
# namespaces, gvisor (docs/security.md), or rlimit_only: weaker, commands then see this
# machine's files and network.
SANDBOX ?= namespaces
# Passed on: make forge ARGS=--config.seed=1, make test ARGS='-k sandbox'.
ARGS ?=
# Test processes at once: on two cores, a third one works while others wait.
JOBS ?= 3
# SIGKILLs of make test-kills.
KILLS ?= 50

# Packages of tests whose own requirements, which nothing here needs, are old or large.
NO_DEPS := bfcl-eval==2026.3.23 mpmath==1.3.0 miniwob==1.1.0
# JetStream without TensorFlow. Apart: its wheel also has a package `benchmarks`.
JETSTREAM := google-jetstream==0.2.2 grpcio==1.85.3 shortuuid==1.0.13

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# The site is built in an environment of its own, which has neither JAX nor m2jax: it reads
# docstrings from the sources.
DOCS_VENV ?= $(VENV)-docs
DOCS := mkdocs-material==9.8.2 mkdocstrings-python==2.0.11
SITE := workdir/site

.PHONY: help setup lock sandbox forge forge-tasks docs lint format clean
.PHONY: test test-long test-parts test-smoke test-thorough test-types
.PHONY: test-kills test-clients test-thousand

help:
	@echo 'make forge      set up, then the main job: a tiny M2 learns shell tasks'
	@echo '                WORKDIR=$(WORKDIR) SANDBOX=$(SANDBOX) ARGS=--config.x=...'
	@echo 'make forge-tasks  set up, then COUNT=$(COUNT) tasks of every pipeline'
	@echo 'make test       set up, then lint, import contracts and the fast tests'
	@echo 'make test-long  set up, then the long tests'
	@echo 'make test-parts set up, then the fast tests of $(PARTS)'
	@echo 'make test-PART  set up, then the fast and long tests of one of them'
	@echo 'make test-thorough  set up, then all tests, with more meshes, kills and examples'
	@echo 'make test-smoke set up, then the least that must work, as users compile it'
	@echo 'make test-types set up, then tests of arrays with their hints checked'
	@echo 'make test-kills set up, then KILLS=$(KILLS) SIGKILLs at random moments of a run'
	@echo 'make test-clients  set up, then published coding agents, from npm and PyPI'
	@echo 'make test-thousand  set up, then 1,000 SWE tasks in one run, checked: hours'
	@echo 'make setup      virtual environment in $(VENV), and the sandbox'
	@echo 'make lock       uv.lock and constraints.txt, with uv; ARGS=--upgrade'
	@echo 'make docs       the site of docs/, in $(SITE)'
	@echo 'make lint       ruff, import contracts, types; make format mends what it can'
	@echo 'make clean      removes caches; keeps $(VENV) and workdir'

setup: $(INSTALLED) sandbox

PACKAGED := setup.cfg setup.py pyproject.toml m2jax_pipelines/pyproject.toml
$(INSTALLED): $(PACKAGED) constraints.txt
	@python='$(PYTHON)'; \
	  [ -x $(BIN)/python ] || "$${python:-$$(.ci/find-python)}" -m venv $(VENV)
	@echo "installing into $(VENV) ($$($(BIN)/python --version)): a minute or two"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -e '.[test]' -e ./m2jax_pipelines -c constraints.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --no-deps $(NO_DEPS) || echo 'tests that need one of $(NO_DEPS) are skipped'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade \
	  --no-deps --target $(VENV)/jetstream $(JETSTREAM) || \
	  echo 'the test that needs $(JETSTREAM) is skipped'
	@touch $@

# The versions for uv and for pip: constraints.txt is the part of uv.lock that the tests
# install. ARGS=--upgrade takes newer ones.
UV ?= uv
EVERYWHERE := ; python_full_version < '3.14' and sys_platform == 'linux'
lock:
	$(UV) lock $(ARGS)
	@{ echo '# Written by `make lock` from uv.lock: what the tests install.'; \
	  $(UV) export --quiet --frozen --all-packages --extra test --no-hashes --no-header \
	  --no-annotate --no-emit-workspace | sed "s/ *$(EVERYWHERE)$$//"; } > constraints.txt

sandbox: $(INSTALLED)
	@$(BIN)/python -m m2jax.sandbox $(SANDBOX) --quick --install

forge: setup
	$(BIN)/python -m experiments.forge \
	  --config=configs/forge.py --workdir=$(WORKDIR) \
	  --config.episodes.backend=$(SANDBOX) $(ARGS)

# A small policy, and ten rounds of its scaffold (docs/self_evolution.md).
evolve: WORKDIR := workdir/evolve
evolve: setup
	$(BIN)/python -m experiments.forge --config=configs/explore.py:quick \
	  --workdir=$(WORKDIR)/policy
	$(BIN)/python -m experiments.evolve --config=configs/evolve.py:demo \
	  --config.checkpoint=$(WORKDIR)/policy --workdir=$(WORKDIR)/rounds $(ARGS)

# A few tasks of every pipeline that is found, each in a subfolder of WORKDIR.
COUNT ?= 5
forge-tasks: WORKDIR := workdir/tasks
forge-tasks: setup
	$(BIN)/python -m experiments.make_all_tasks --workdir=$(WORKDIR) \
	  --count=$(COUNT) --backend=$(SANDBOX) $(ARGS)

# A process runs whole files, in the order of tests/conftest.py. Bytecode is kept whatever
# the environment says: tests start many processes. docs/testing.md says what runs when.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(JOBS) \
  --dist loadfile --no-loadscope-reorder
PARTS := benchmarks launch pipelines plan viewer
CORE := $(addprefix --ignore=tests/,$(PARTS))
FAST := not long and not thorough and not hours and not smoke
# K/N: the files whose name falls into the K-th of N parts.
SAMPLE :=

test: setup lint
	$(PYTEST) $(CORE) -m '$(FAST)' $(ARGS)

test-long: setup
	TEST_SAMPLE=$(SAMPLE) $(PYTEST) $(CORE) -m long --durations=10 $(ARGS)

# The fast tests of all parts; test-PART adds the long ones of one.
test-parts: setup
	$(PYTEST) $(addprefix tests/,$(PARTS)) -m '$(FAST)' $(ARGS)

$(addprefix test-,$(PARTS)): test-%: setup
	$(PYTEST) tests/$* -m 'not thorough and not hours' $(ARGS)

# Everything: the above, and more meshes, processes, kills, attempts and examples. Begun
# again at the same code, it leaves out what has passed.
DONE = .cache/thorough-$(shell (git rev-parse HEAD; git diff HEAD) | sha1sum | cut -c1-12)
test-thorough: setup
	HYPOTHESIS_PROFILE=thorough TEST_DONE=$(DONE) $(PYTEST) -m 'not hours' \
	  --durations=20 $(ARGS)

# The least that must work on every Python, compiled as it is for users.
test-smoke: setup
	TEST_OPTIMISED=1 JAX_COMPILATION_CACHE_DIR=$(VENV)/jax \
	  $(BIN)/python -m pytest -q -m smoke $(ARGS)

# The same functions with their hints of arrays checked.
TYPED := test_axes.py forest kernels layers model moe optim rl
test-types: setup
	TEST_TYPES=1 $(PYTEST) $(addprefix tests/,$(TYPED)) -m '$(FAST)' $(ARGS)

# Ten minutes and more.
test-kills: SEED := 0
test-kills: setup
	KILLS=$(KILLS) SEED=$(SEED) \
	  $(BIN)/python -m pytest -q -s tests/faults/test_kills.py $(ARGS)

# Claude Code, Codex, opencode and others as they are published; RECORD=1 renews the
# requests in tests/gateway/recorded. Downloads about a gigabyte the first time.
test-clients: setup
	CLIENTS_DIRECTORY=$(VENV)/clients \
	  $(BIN)/python -m pytest -q -rs tests/gateway/external/run_clients.py $(ARGS)

# Hours; COUNT=20 for fewer. With WORKDIR the run is kept, and continues.
test-thousand: COUNT := 1000
test-thousand: WORKDIR :=
test-thousand: setup
	SWE_COUNT=$(COUNT) SWE_WORKDIR=$(WORKDIR) \
	  $(BIN)/python -m pytest -q -s tests/pipelines/swe/test_thousand.py $(ARGS)

$(DOCS_VENV)/.installed: Makefile
	@python='$(PYTHON)'; \
	  [ -x $(DOCS_VENV)/bin/python ] || \
	  "$${python:-$$(.ci/find-python)}" -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(DOCS)
	@touch $@

# Strict: a warning, a broken link or a missing anchor fails. Needs no network once the
# environment is there.
docs: $(DOCS_VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet --site-dir $(SITE)
	@echo '$(SITE)/index.html; with its search: python -m http.server -d $(SITE)'

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --config setup.cfg
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf {,m2jax_pipelines/}{build,dist,*.egg-info}
	find m2jax m2jax_pipelines experiments configs tests -name __pycache__ -prune -exec rm -rf {} +
