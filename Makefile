# Two commands are all a newcomer needs:
#   make demo    set everything up, break a cluster, print the verdict, leave a report
#   make test    set everything up, run the tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.setup-done
NODE_SOURCES := $(shell find node -name '*.py' 2>/dev/null)

SPARK := $(VENV)/.spark-done

.PHONY: help setup host demo test lint bench node clean

help:
	@echo "make demo   break a cluster and see the verdict and report (sets everything up)"
	@echo "make test   run the tests (sets everything up)"
	@echo "make lint   ruff and mypy --strict"
	@echo "make bench  performance figures"
	@echo "make node   build node.pyz, the replica as one file"

setup: $(SETUP)

$(SETUP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "python3-venv is needed (apt install python3-venv)" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,lint]'
	@touch $(SETUP)

# Spark and a Java for it: for the tests, and for harness report. The demo does without.
$(SPARK): $(SETUP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,lint,spark]'
	@touch $(SPARK)

# What only root can add to the host (nftables, iproute2); without it the run uses link proxies.
host:
	@sh scripts/setup-host.sh

node: node.pyz

node.pyz: $(SETUP) $(NODE_SOURCES)
	$(BIN)/python scripts/build_pyz.py node.pyz

demo: $(SETUP) host
	$(BIN)/harness run --nemesis partition --nemesis-interval 2.5 --time-limit 30

# Four at a time where safe (many wait most of the time), then those of Spark, each file by one of two, then whole runs of
# real clusters, two at a time, but for those that try `harness clean`, which takes whatever is dead: one after the other.
# Python keeps what it has compiled, also where the environment says not to: the tests start hundreds of processes.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(SPARK) host
	$(BIN)/python -m pytest -n 4 -m "not serial and not spark" -q
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m spark -q
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m serial -q

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(SPARK) host
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) node.pyz build dist *.egg-info
