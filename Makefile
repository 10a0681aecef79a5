# Everything runs in .venv, which `make setup` fills. CI runs these same targets (.ci/run).
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
export ORT_DISABLE_TELEMETRY := 1
# Tests start hundreds of processes: each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup lint structure format test test-unit test-distributed test-slow demo bench-smoke docs docs-check lock sbom clean

setup: .venv/ready

# torch first and alone: an open range would pull a CUDA build of several GB on a CPU machine.
.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,models,learned]'
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.structure

structure: setup
	$(BIN)/python -m tests.structure

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: setup
	$(BIN)/pytest -q -n auto
	$(BIN)/pytest -q -n 2 -m 'distributed and not slow'

test-unit: setup
	$(BIN)/pytest -q -n auto

test-distributed: setup
	$(BIN)/pytest -q -n 2 -m 'distributed and not slow'

test-slow: setup
	$(BIN)/pytest -q -m slow

demo: setup
	$(BIN)/python -m examples.demo

# Each by itself, as many at once as there are cores; what one said is printed when it ends.
bench-smoke: setup
	@grep -l '^def main' benchmarks/*.py | xargs -P $$(env -u OMP_NUM_THREADS nproc) -I SCRIPT sh -c \
		'said=$$($(BIN)/python SCRIPT --smoke 2>&1); done=$$?; printf "%s --smoke\n%s\n" SCRIPT "$$said"; exit $$((done != 0))'

.venv/docs: .venv/ready
	$(BIN)/pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

# The site, in build/site. A link, a heading or a page that is not there ends the build.
docs: .venv/docs
	$(BIN)/python -m tools.site build/pages
	$(BIN)/sphinx-build -q -W --keep-going build/pages build/site

# That, and what the pages say: commands, programs, errors, figures; notebooks; the tutorial from an empty environment (10 minutes).
docs-check: docs
	$(BIN)/pytest -q tests/test_docs.py tests/test_commands.py tests/test_errors.py tests/pdv/cli/test_app.py
	$(BIN)/pytest -q -m 'slow or not slow' tests/pdv/cli/test_catalogue.py
	$(BIN)/python -m tools.notebooks
	$(BIN)/python -m tools.tutorial

.venv/release: .venv/ready
	$(BIN)/pip install --quiet -e '.[release]'
	touch $@

# All packages but torch, with hashes; no index of this machine is named.
lock: .venv/release
	CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/pip-compile --quiet --generate-hashes --strip-extras --no-emit-options \
		--no-emit-index-url --no-emit-find-links --no-emit-trusted-host --unsafe-package torch \
		--unsafe-package setuptools -c constraints.txt -o requirements.lock pyproject.toml

# A CycloneDX bill of materials, in build/sbom.cdx.json.
sbom: .venv/release
	mkdir -p build
	{ grep '^torch==' constraints.txt; cat requirements.lock; } | $(BIN)/cyclonedx-py requirements - \
		--pyproject pyproject.toml --output-reproducible -o build/sbom.cdx.json

clean:
	rm -rf .venv build dist demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
