# Two commands for newcomers: `make serve` and `make test`. Everything installs itself into .venv from the hashed lock.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
CACHE  := .cache
WORKERS ?= 2
SOAK_MINUTES ?= 60
MUTANT_MINUTES ?= 60

.DEFAULT_GOAL := help
.PHONY: help serve test lint types bench soak mutants wheel lock clean

help:
	@echo "make serve    serve a tiny Gemma-4-architecture model on 127.0.0.1:30000   (MODEL=/path ARGS=\"--page-size 128\")"
	@echo "make test     run the CPU gate (test/manifests/cpu_gate.toml)"
	@echo "make lint     ruff, format check"
	@echo "make types    mypy strict on mem_cache, managers"
	@echo "make bench    the quick cache benchmark (shapes and ratios, <= 60 s)"
	@echo "make soak     one million checked steps of the cache core (SOAK_MINUTES=60)"
	@echo "make mutants  mutate the cache core; every mutant must be killed (MUTANT_MINUTES=60)"
	@echo "make wheel    build dist/*.whl"
	@echo "make clean    remove .venv, .cache, build, dist"

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python >= 3.11 is needed, $(PYTHON) is older: set PYTHON=python3.11 or newer" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

serve: $(STAMP)
	@export SGL_JAX_CACHE_DIR="$${SGL_JAX_CACHE_DIR:-$(CURDIR)/$(CACHE)}"; \
		exec $(BIN)/python -m sgl_jax.tools.serve_tiny $(if $(MODEL),--model $(MODEL)) -- $(ARGS)

test: $(STAMP)
	$(BIN)/python -m sgl_jax.test.gate test/manifests/cpu_gate.toml --workers $(WORKERS)

lint: $(STAMP)
	$(BIN)/ruff check python
	$(BIN)/ruff format --check python

types: $(STAMP)
	$(BIN)/mypy $(wildcard python/sgl_jax/srt/mem_cache python/sgl_jax/srt/managers python/sgl_jax/evidence)

bench: $(STAMP)
	$(BIN)/sgl-jax bench cache --suite quick

soak: $(STAMP)
	$(BIN)/python -m sgl_jax.tools.soak --steps 1000000 --minutes $(SOAK_MINUTES)

mutants: $(STAMP)
	$(BIN)/python -m sgl_jax.tools.mutants --minutes $(MUTANT_MINUTES)

wheel: $(STAMP)
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation -w dist .

lock:
	uv pip compile pyproject.toml --extra dev --universal --generate-hashes --no-header --no-emit-index-url -o requirements.lock

clean:
	rm -rf $(VENV) $(CACHE) build dist python/*.egg-info
