# From a machine with nothing but Python 3.11 or newer, one command does all: make train, make test, make lint.
# PYTHON=... chooses the interpreter; by default it is the first one that fits.

VENV := .venv
RUN := $(VENV)/bin/python
CUDA_VENV := .venv-cuda
TYPE_CHECK_TREE := build/type-check
TORCH := $(shell grep '^torch==' constraints.txt)
PYTHONS := $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14)
MACHINE_PYTHON := $(or $(PYTHON),python3)

# Run from the repository root, Python would find the folder mfwrap/ before the installed package, which alone has
# mfwrap.callbacks and mfwrap.recipes.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help train test test-full test-cuda lint type-check-tree format benchmark docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s  %s\n", $$1, $$2 }' Makefile

train: $(VENV)/.installed ## train the default recipe, a small Llama; the run goes to runs/causal_lm
	$(RUN) -m mfwrap.recipes.causal_lm

# One thread a worker: with torch's default, two workers would start as many threads as there are cores, twice.
test: $(VENV)/.installed ## run the fast tests
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 -m "not slow and not cuda"

test-full: $(VENV)/.installed ## run the fast tests and the slow ones
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 -m "not cuda"

# An environment of its own that sees all packages of the machine's python3, so that nothing is written outside this
# folder. --system-site-packages would not do: it passes over the packages of a python3 that is itself in a virtual
# environment.
test-cuda: ## run the CUDA tests on what the machine's python3 has, without network
	@$(MACHINE_PYTHON) -c '$(HAS_CUDA)'
	$(MACHINE_PYTHON) -m venv --clear --without-pip $(CUDA_VENV)
	@$(MACHINE_PYTHON) -c '$(SITE_FOLDERS)' > "$$($(CUDA_VENV)/bin/python -c '$(SITE_FOLDER)')/machine.pth"
	$(CUDA_VENV)/bin/python -m pip install --no-index --no-deps --no-build-isolation -e .
	$(CUDA_VENV)/bin/python -m pytest -m cuda

lint: $(VENV)/.installed type-check-tree ## check style, formatting and types
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	cd $(TYPE_CHECK_TREE) && "$(CURDIR)/$(RUN)" -m mypy --config-file "$(CURDIR)/pyproject.toml" \
	    --cache-dir "$(CURDIR)/.mypy_cache" -p mfwrap $(patsubst benchmarks/%.py,-m %,$(wildcard benchmarks/*.py))

# mypy knows neither a package-dir mapping nor the import hook of an editable install: from the repository root it
# passes over callbacks/ and recipes/ and reports success. It gets links in the shape of an ordinary install.
type-check-tree:
	@rm -rf $(TYPE_CHECK_TREE) && mkdir -p $(TYPE_CHECK_TREE)/mfwrap
	@ln -s "$(CURDIR)"/mfwrap/* "$(CURDIR)/callbacks" "$(CURDIR)/recipes" $(TYPE_CHECK_TREE)/mfwrap
	@ln -s "$(CURDIR)"/benchmarks/*.py $(TYPE_CHECK_TREE)

format: $(VENV)/.installed ## format the code and repair what ruff can repair
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format

# Without PYTHONSAFEPATH: what the script imports lies beside it.
benchmark: $(VENV)/.installed-benchmark ## measure everything after backward, and whole steps of the Trainer, beside peers
	PYTHONSAFEPATH= $(RUN) benchmarks/epilogue.py
	PYTHONSAFEPATH= $(RUN) benchmarks/trainer.py
	PYTHONSAFEPATH= $(RUN) benchmarks/distributed.py
	PYTHONSAFEPATH= $(RUN) benchmarks/monitors.py

# mkdocstrings reads the package, with callbacks/ and recipes/, in the shape of an ordinary install.
docs: $(VENV)/.installed-docs type-check-tree ## build the site of the documentation into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

clean: ## remove environments, builds and caches; runs/ stays
	rm -rf $(VENV) $(CUDA_VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -rf mfwrap/__pycache__ callbacks/__pycache__ recipes/__pycache__ tests/__pycache__ benchmarks/__pycache__

# The stamp is written last, so an installation that broke off is taken up again; a new environment is made unless
# the one that is there has a working pip.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(RUN) -m pip --version >/dev/null 2>&1 || { $(make-environment); }
	$(RUN) -m pip install "$(TORCH)"
	$(RUN) -m pip install -c constraints.txt -e '.[recipes,test,lint]'
	@touch $@

$(VENV)/.installed-benchmark: $(VENV)/.installed
	$(RUN) -m pip install -c constraints.txt -e '.[benchmark]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(RUN) -m pip install -c constraints.txt -e '.[docs]'
	@touch $@

FITS := import importlib.util, sys; name = sys.executable; \
    sys.version_info >= (3, 11) or sys.exit(name + " is Python " + sys.version.split()[0]); \
    importlib.util.find_spec("ensurepip") or sys.exit(name + " has no ensurepip")

define make-environment
for python in $(PYTHONS); do \
  command -v "$$python" >/dev/null && "$$python" -c '$(FITS)' || continue; \
  echo "$$python -m venv $(VENV)"; \
  "$$python" -m venv --clear $(VENV) && exit; \
done; \
echo "mfwrap needs Python 3.11 or newer with its module venv (Debian, Ubuntu: apt install python3-venv)," >&2; \
echo "and found none among: $(PYTHONS); name one with make PYTHON=/path/to/python3.12" >&2; \
exit 1
endef

HAS_CUDA := import sys, torch; \
    torch.cuda.is_available() or sys.exit("the torch of " + sys.executable + " sees no CUDA device")
SITE_FOLDERS := import sys; \
    [print("import site; site.addsitedir(%r)" % path) for path in sys.path if path.endswith("-packages")]
SITE_FOLDER := import sysconfig; print(sysconfig.get_path("purelib"))
