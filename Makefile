# make demo | lab | teacher | test | docs: each sets up what it needs in .venv the first time, and nothing the second time.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# pip compiles modules one at a time. Below, `compileall` compiles one per core, but not the tests of packages and the models of
# transformers, a third of all: those that are imported are compiled then. Some packages hold files that no Python compiles.
export PIP_COMPILE := 0

# JupyterLab then saves widgets with the notebook: opened again, it shows them without running anything. Its server sends small
# messages at once.
SETTINGS := .venv/share/jupyter/lab/settings/overrides.d
SERVER := .venv/etc/jupyter

.PHONY: docs demo lab teacher test tests quick check lint types clean

demo: .venv/.core
	$(BIN)/python -m toolkit demo --out demo.html

# Jupyter refuses to run as root (the usual user in a container) without --allow-root.
lab: .venv/.lab
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) notebooks/00_course.ipynb

# Every lesson with its answers, as an executed notebook and as slides, in the folder teacher.
teacher: .venv/.lab
	$(BIN)/python -m toolkit.ui.lessons.editions teacher

# Tests run in two processes of one thread each while mypy checks types; then browser tests, which mostly wait, in three. Tests
# that time what a user waits for run alone. All compile exports into one folder, which starts empty.
test: export TOOLKIT_TEST_EXPORTS := $(CURDIR)/.venv/exports
test: lint
	rm -rf $(TOOLKIT_TEST_EXPORTS)
	$(MAKE) --no-print-directory -j 2 types tests
	$(BIN)/python -m pytest tests/browser -m 'not timed' -n 3 --dist worksteal --durations=10
	$(BIN)/python -m pytest tests/browser -m timed

tests: .venv/.test
	$(BIN)/python -m pytest tests --ignore=tests/browser -n 2 --dist worksteal --durations=25

# A few tests of each area, in at most 90 seconds.
quick: .venv/.test
	$(BIN)/python -m pytest @tests/quick.txt -n 2 --dist worksteal

check: lint types

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.test
	$(BIN)/mypy

# Lessons and guides run once, four at a time, and again only after a change of the package. Warnings are errors.
docs: .venv/.docs
	$(BIN)/python -m sphinx -j 4 -b html -W --keep-going -q docs docs/_build/html
	@echo "Open docs/_build/html/index.html"

clean:
	rm -rf .venv demo.html docs/_build

.venv/.torch: binder/install_torch.py
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer was not found. Install it, or run: make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv \
		|| { rm -rf .venv; echo "This Python has no module 'venv'. On Debian or Ubuntu: apt install python3-venv"; exit 1; }
	$(BIN)/python binder/install_torch.py
	@touch $@

# JupyterLab installs rfc3987-syntax for one optional check (addresses in JSON schemas). Importing it takes a second at each start of
# the server, because it compiles a grammar, so it is removed.
# One call of pip each, because each call prepares an environment in which it builds the package.
.venv/.lab: EXTRAS := [lab]
.venv/.test: EXTRAS := [lab,hf,ranks,test]
.venv/.docs: EXTRAS := [lab,docs]
.venv/.core .venv/.lab .venv/.test .venv/.docs: .venv/.torch pyproject.toml
	$(PIP) install -e '.$(EXTRAS)'
	@$(BIN)/python -m pip --quiet uninstall --yes rfc3987-syntax 2>/dev/null
	@$(BIN)/python -m compileall -qq -j 0 -x '/tests/|/transformers/models/' .venv/lib || true
	@mkdir -p $(SETTINGS) $(SERVER) && cp binder/jupyterlab.json $(SETTINGS)/decode-toolkit.json && cp binder/jupyter_server_config.py $(SERVER)
	@touch $@
