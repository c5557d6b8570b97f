# Each target sets up what it needs, on a machine that has nothing but Python 3.11 or newer.
# PYTHON=... chooses the interpreter; the default is the first suitable one of PYTHONS.

VENV := .venv
RUN := $(VENV)/bin/python
CUDA_VENV := .venv-cuda
SOURCE_LIST := build/source-files
LOCKED := $(if $(shell command -v flock),flock build/.install.lock)
DEVICE_WHEELS := build/device-wheels
CARRIED := pydantic pydantic_core annotated-types typing-inspection typing_extensions click datasets dill multiprocess transformers trl
TORCH := $(shell grep '^torch==' constraints.txt)
PLOTLY := 4.1.1
IFRAME_WORKER := 1.0.4
PYTHONS := $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14)
MACHINE_PYTHON := $(or $(PYTHON),python3)

# Without PYTHONSAFEPATH, Python started in the repository would import the folder mfwrap/, which lacks mfwrap.callbacks
# and mfwrap.recipes, instead of the installed package.
export PYTHONSAFEPATH := 1
# Some machines set it. Each process of the tests would then compile mfwrap and the tests again.
export PYTHONDONTWRITEBYTECODE :=
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help train test test-full test-cuda device device-wheels device-results mutants matrix peers table scripts names layouts pictures plotly iframe-worker lint format dist benchmark benchmark-full docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s  %s\n", $$1, $$2 }' Makefile

train: $(VENV)/.linked ## train the default recipe, a small Llama; the run goes to runs/causal_lm
	$(RUN) -m mfwrap.recipes.causal_lm

# One thread for each worker: by default, each would start as many threads as there are cores. One worker more than two
# cores have room for, because many tests wait for processes of their own.
test: $(VENV)/.linked ## run the fast tests
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 3 --dist worksteal --durations=25 -m "not slow and not cuda"

test-full: $(VENV)/.installed-docs $(VENV)/.linked ## run the fast tests and the slow ones
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 3 --dist worksteal --durations=25 -m "not cuda"

# A separate environment that sees all packages of the machine's python3, so that nothing is written outside this
# folder. --system-site-packages would not work: it skips the packages of a python3 that is itself in a virtual
# environment. Links take the place of an installation, which would need a setuptools that the machine may not have.
# Four workers, because most of the time of these tests is the host's.
test-cuda: ## run the CUDA tests on what the machine's python3 has, without network
	@$(MACHINE_PYTHON) -c '$(HAS_CUDA)'
	$(MACHINE_PYTHON) -m venv --clear --without-pip $(CUDA_VENV)
	@$(MACHINE_PYTHON) -c '$(SITE_FOLDERS)' > "$$($(CUDA_VENV)/bin/python -c '$(SITE_FOLDER)')/machine.pth"
	@mkdir "$$($(CUDA_VENV)/bin/python -c '$(SITE_FOLDER)')/mfwrap"
	@ln -s $(CURDIR)/mfwrap/* $(CURDIR)/callbacks $(CURDIR)/recipes \
	    "$$($(CUDA_VENV)/bin/python -c '$(SITE_FOLDER)')/mfwrap"
	OMP_NUM_THREADS=1 $(CUDA_VENV)/bin/python -m pytest -n 4 --dist worksteal --durations=25 -rs -m cuda

# Nothing is installed, and nothing is written outside this folder and OUT: benchmarks/device/environment.py.
device: ## test and measure on a GPU with what the machine's python3 has, without network (7 minutes)
	PYTHONPATH="$(CURDIR)/benchmarks$${PYTHONPATH:+:$$PYTHONPATH}" $(MACHINE_PYTHON) -m device --device $(or $(DEVICE),cuda) --sections "$(SECTIONS)" \
	    $(if $(LIMIT),--limit $(LIMIT)) $(if $(filter-out 0,$(SMALL)),--small) $(if $(filter none,$(WHEELS)),,--wheels $(or $(WHEELS),$(DEVICE_WHEELS)))

# For Python 3.12 on Linux x86-64, in the versions of constraints.txt. They may be copied to a machine without network.
device-wheels: ## fetch the wheels that a GPU machine may lack into build/device-wheels (18 MB)
	rm -rf $(DEVICE_WHEELS)
	$(MACHINE_PYTHON) -m pip download --no-deps --only-binary=:all: --implementation cp --python-version 3.12 \
	    --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 -c constraints.txt -d $(DEVICE_WHEELS) $(CARRIED)

# The results of earlier runs are kept in benchmarks/device_results.json.
device-results: $(VENV)/.linked ## join results of `make device` in the file or folder FROM, and write them into RESULTS.md
	PYTHONPATH="$(CURDIR)/benchmarks" $(RUN) -m device.published $(or $(FROM),build/device)

# Without PYTHONSAFEPATH, because the script imports a module from its own folder.
mutants: $(VENV)/.linked ## plant 400 faults into the core, and count those that the tests notice (half an hour)
	PYTHONSAFEPATH= $(RUN) .ci/mutants.py

peers: $(VENV)/.linked ## run accelerate's own tests with mfwrap in place, and report what differs (3 minutes)
	$(RUN) .ci/peers.py

# ROWS="core newest" chooses rows; .ci/matrix.py lists them.
matrix: $(VENV)/.installed-matrix ## run the fast tests with old and new versions, and write README's table (an hour)
	$(RUN) .ci/matrix.py $(ROWS)

table: $(VENV)/.linked ## compare the Trainer's options with MFTrainer's, and write docs/trainer_table.md (10 minutes)
	OMP_NUM_THREADS=1 $(RUN) .ci/trainer_table.py

# The scripts are fetched from GitHub, or read in the folder SOURCES: .ci/scripts_table.py.
scripts: $(VENV)/.linked ## run scripts of other libraries with and without mfwrap, and write docs/scripts_table.md (30 minutes)
	OMP_NUM_THREADS=1 $(RUN) .ci/scripts_table.py $(if $(SOURCES),--sources "$(SOURCES)") $(ROWS)

names: $(VENV)/.linked ## write the tables of docs/names.md and docs/migration.md from the table of names
	$(RUN) .ci/name_tables.py

layouts: $(VENV)/.linked ## compare each layout of ranks with one process, and write the table in docs/ranks.md (1 minute)
	OMP_NUM_THREADS=1 $(RUN) .ci/layout_table.py

pictures: $(VENV)/.linked ## draw the pictures of the docs: what each monitor writes, and run pages (6 minutes)
	OMP_NUM_THREADS=1 $(RUN) .ci/monitor_pictures.py
	OMP_NUM_THREADS=1 $(RUN) .ci/page_pictures.py

# The npm package is the only source of a plotly.js without maps, three dimensions and other charts of 3 MB.
plotly: ## fetch the plotly.js of the run page from the npm registry again (it needs npm)
	mkdir -p build/plotly
	cd build/plotly && npm pack --silent plotly.js-cartesian-dist-min@$(PLOTLY) && tar xzf *-$(PLOTLY).tgz
	gzip -9nc build/plotly/package/plotly-cartesian.min.js > mfwrap/report/plotly-cartesian.min.js.gz

# Browsers start no worker from file://, and the search of the site is a worker. This script runs it in a frame instead.
iframe-worker: ## fetch the script that lets the site search without a server from the npm registry again (it needs npm)
	mkdir -p build/iframe-worker docs/javascripts
	cd build/iframe-worker && npm pack --silent iframe-worker@$(IFRAME_WORKER) && tar xzf *-$(IFRAME_WORKER).tgz
	cd build/iframe-worker/package && \
	    { echo "/* shim/index.js of the npm package iframe-worker $(IFRAME_WORKER). MIT License."; echo; cat LICENSE; \
	    echo "*/"; cat shim/index.js; } > "$(CURDIR)/docs/javascripts/iframe-worker.js"

lint: $(VENV)/.linked ## check style, formatting and types
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	cd build && MYPYPATH="$(CURDIR)/benchmarks" "$(CURDIR)/$(RUN)" -m mypy --config-file "$(CURDIR)/pyproject.toml" \
	    --cache-dir "$(CURDIR)/.mypy_cache" -p mfwrap -p device $(patsubst benchmarks/%.py,-m %,$(wildcard benchmarks/*.py))

format: $(VENV)/.linked ## format the code and repair what ruff can repair
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format

# Without PYTHONSAFEPATH, because the scripts import modules from their own folder.
benchmark: $(VENV)/.installed-benchmark $(VENV)/.linked ## measure against other libraries, into benchmarks/RESULTS.md
	PYTHONSAFEPATH= $(RUN) benchmarks/run.py

benchmark-full: $(VENV)/.installed-benchmark $(VENV)/.linked ## measure the same for longer, for less spread
	PYTHONSAFEPATH= $(RUN) benchmarks/run.py --full

# The wheel is built from the sdist, so neither has files that an earlier build left in build/. PYTHONSAFEPATH, which is
# set above, hides that folder from `-m build`.
dist: $(VENV)/.linked ## build the sdist and the wheel of this version into dist/, and check what PyPI reads of them
	rm -rf dist
	$(RUN) -m build --no-isolation
	$(RUN) -m twine check --strict dist/*

docs: $(VENV)/.installed-docs $(VENV)/.linked ## build the site of the documentation into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

clean: ## remove environments, builds and caches; runs/ stays
	rm -rf $(VENV) $(CUDA_VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find mfwrap callbacks recipes tests benchmarks .ci -name __pycache__ -prune -exec rm -rf {} +

# Of two makes at once, one installs, and the other waits for it if the system has flock. The stamp is written last, so
# the next make repeats an installation that failed. An existing environment is kept if its pip works.
$(VENV)/.installed: pyproject.toml constraints.txt
ifndef INSTALLS
	@mkdir -p build
	@$(LOCKED) $(MAKE) --no-print-directory INSTALLS=1 $@
else
	@$(RUN) -m pip --version >/dev/null 2>&1 || { $(make-environment); }
	$(RUN) -m pip install "$(TORCH)"
	$(RUN) -m pip install -c constraints.txt -e '.[recipes,test,lint]'
	@touch $@
endif

# An editable install holds a link for each file (pyproject.toml says why), so a file that was added or removed needs
# new links. The list is rewritten only when it differs; an unchanged list is older than the stamp. Of two makes at once,
# one makes the links, and the other waits for them if the system has flock.
$(VENV)/.linked: $(VENV)/.installed $(SOURCE_LIST)
	@$(LOCKED) sh -c '[ -e $@ ] && [ -z "$$(find $^ -newer $@)" ] \
	    || { $(RUN) -m pip install --quiet --no-deps --no-build-isolation -e . && touch $@; }'

$(SOURCE_LIST): FORCE
	@mkdir -p $(@D)
	@new=$@.$$$$; find mfwrap callbacks recipes -type f ! -path '*/__pycache__/*' | sort > $$new; \
	if cmp -s $$new $@; then rm $$new; else mv $$new $@; fi

FORCE:

$(VENV)/.installed-benchmark: $(VENV)/.installed
	$(RUN) -m pip install -c constraints.txt -e '.[benchmark]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(RUN) -m pip install -c constraints.txt -e '.[docs]'
	@touch $@

$(VENV)/.installed-matrix: $(VENV)/.installed
	$(RUN) -m pip install -c constraints.txt uv
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
