# Two commands do everything: `make demo` and `make test`. Both need only Python >= 3.11.
.DELETE_ON_ERROR:
SHELL := /bin/sh
# FULL=1, as in CI: long tests too, and all daily ones on the oldest jax
PYTEST := -m pytest -n 2 --dist worksteal

# The oldest supported jax is what Python 3.11 resolves to, the newest what 3.12 and later do.
OLDEST := 3.11
NEWEST := $(shell v=$$(scripts/find-python newest) && $$v -c 'import sys; print("%d.%d" % sys.version_info[:2])')

# EXTRAS=examples,cuda on a machine with an NVIDIA GPU
EXTRAS ?= examples
comma := ,
INSTALLED := .venv/.installed-$(subst $(comma),-,$(EXTRAS))

.PHONY: demo docs quick unit test test-oldest test-newest trainers donation lint conformance gpu clean

demo: $(INSTALLED) .venv/.compiler  ## a small GPT, its optimizer state offloaded; and one picture of what that does
	.venv/bin/python examples/demo.py $(ARGS)

# XLA's compiler for NVIDIA GPUs, without CUDA's libraries
.venv/.compiler: $(INSTALLED)
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check jax-cuda13-plugin || \
	    echo "!! jax-cuda13-plugin DOES NOT INSTALL HERE: the demo shows no peaks and no times of a large model"
	@touch $@

$(INSTALLED): pyproject.toml
	python=$$(scripts/find-python newest) || { echo "jax_offload needs Python >= 3.11; none found" >&2; exit 1; }; \
	"$$python" -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	touch $@

# The second environment is installed beside what needs the first alone; both at a time would write one egg-info.
test: .venvs/$(NEWEST)/.installed  ## everything that runs without an accelerator, on the newest and the oldest jax
	@$(MAKE) --no-print-directory -j 3 lint test-newest $(shell scripts/find-python $(OLDEST) >/dev/null && echo .venvs/$(OLDEST)/.installed)
	@$(MAKE) --no-print-directory test-oldest

quick: .venvs/$(NEWEST)/.installed  ## while you work, in less than a minute: lint, and the rules of the core on the newest jax
	@$(MAKE) --no-print-directory -j 2 lint unit

unit: .venvs/$(NEWEST)/.installed
	.venvs/$(NEWEST)/bin/python -m pytest tests/unit

.venvs/%/.installed: pyproject.toml
	@python=$$(scripts/find-python $*) || { echo "Python $* is not installed" >&2; exit 1; }; \
	"$$python" -m venv .venvs/$*
	.venvs/$*/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,aot]'
	touch $@

lint: .venvs/$(NEWEST)/.installed
	.venvs/$(NEWEST)/bin/ruff check .
	.venvs/$(NEWEST)/bin/ruff format --check .
	.venvs/$(NEWEST)/bin/pyright --pythonpath .venvs/$(NEWEST)/bin/python

test-newest: .venvs/$(NEWEST)/.installed
	.venvs/$(NEWEST)/bin/python -c 'import jax, sys; print(f"== newest: Python {sys.version.split()[0]}, jax {jax.__version__}")'
	.venvs/$(NEWEST)/bin/python $(PYTEST) $(if $(FULL),,--daily)

# Long tests run on the newest jax alone, and of the daily ones those that are marked oldest; with FULL=1 all daily ones.
test-oldest:
	@if [ "$(NEWEST)" = "$(OLDEST)" ]; then \
	    echo "!! ONLY PYTHON $(OLDEST) IS INSTALLED: jax's newest supported version, which needs 3.12, WAS NOT TESTED"; \
	elif scripts/find-python $(OLDEST) >/dev/null; then \
	    $(MAKE) --no-print-directory .venvs/$(OLDEST)/.installed && \
	    .venvs/$(OLDEST)/bin/python -c 'import jax, sys; print(f"== oldest: Python {sys.version.split()[0]}, jax {jax.__version__}")' && \
	    .venvs/$(OLDEST)/bin/python $(PYTEST) --daily $(if $(FULL),,--oldest); \
	else \
	    echo "!! PYTHON $(OLDEST) IS NOT INSTALLED: the oldest supported jax WAS NOT TESTED"; \
	fi

# One by one: what does not install here is named, and its tests are skipped. TRAINERS_PYTHON=3.11 for the oldest jax.
TRAINERS_PYTHON ?= $(NEWEST)
TRAINERS := .venvs/trainers-$(TRAINERS_PYTHON)

$(TRAINERS)/.installed: pyproject.toml
	@python=$$(scripts/find-python $(TRAINERS_PYTHON)) || { echo "Python $(TRAINERS_PYTHON) is not installed" >&2; exit 1; }; \
	"$$python" -m venv $(TRAINERS)
	$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[examples]' 'pytest>=8'
	@$(TRAINERS)/bin/python -c 'import tomllib; \
	    print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["trainers"], sep="\n")' | \
	while read -r package; do \
	    $(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check --editable . "$$package" || \
	    echo "!! $$package DOES NOT INSTALL HERE: ITS TESTS ARE SKIPPED"; \
	done
	touch $@

trainers: $(TRAINERS)/.installed  ## trainers that people use: MaxText, Tunix, Flax, Equinox, plain loops
	$(TRAINERS)/bin/python -m pytest --trainers -rs tests/trainers

donation: .venvs/$(NEWEST)/.installed  ## all ways of donating and returning: as lowered, as run, as compiled for an H200 and a TPU
	.venvs/$(NEWEST)/bin/python -m pytest -n 2 tests/test_donation.py tests/aot/test_peaks.py -k "donation or alias"

conformance: .venvs/$(NEWEST)/.installed  ## optax's own tests: plain, and offloaded
	CONFORMANCE=all .venvs/$(NEWEST)/bin/python -m pytest tests/test_conformance.py

# The first thing on a GPU: 9 minutes a part, 40 in all. Without one it says so and exits with 2, which make calls an
# error; ARGS=--toy runs all of it anywhere.
gpu: EXTRAS := examples,cores,cuda
gpu:  ## values, random steps, the link and steps on the NVIDIA GPU that is here: see benchmarks/README.md
	@$(MAKE) --no-print-directory EXTRAS=$(EXTRAS) .venv/.installed-$(subst $(comma),-,$(EXTRAS))
	@.venv/bin/python -m benchmarks.run $(ARGS)

# Links that lead nowhere and docstrings that do not parse are errors.
docs:  ## the site, as site/index.html; ARGS=serve shows it while you write
	@$(MAKE) --no-print-directory EXTRAS=docs .venv/.installed-docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs $(or $(ARGS),build --strict)

clean:
	rm -rf site .venv .venvs .pytest_cache .ruff_cache .hypothesis
