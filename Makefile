# Two commands: `make demo` and `make test`. Each does all its own set-up (.venv, torch, the extension); a second call is quick.
#   make demo ARGS="--steps 40 --layers 4"     make test ARGS="tests/cli -k info"     make PYTHON=python3.12 test
#   make WORKERS=4 test     make PYTEST="-x --lf" test    adds to the arguments of pytest
# Three tiers of tests: `make check`, `make test`, `make full`; tests/harness/tiers.py says which test is in which.
PYTHON ?= python3
ARGS ?=
PYTEST ?=
WORKERS ?= 2

VENV := .venv
OTHERS := $(patsubst .venv-%,%,$(wildcard .venv-*))
BIN := $(VENV)/bin
PY_DIRS := src compiler runtime tools build_tools examples tests benchmarks docs
CXX_FILES = $(shell find csrc -name '*.h' -o -name '*.hpp' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null | sort)
SOURCES := $(shell find src compiler runtime tools csrc -type f -not -path '*/__pycache__/*' -not -path '*.egg-info/*' 2>/dev/null)
SOURCES += $(wildcard setup.py build_tools/*.py pyproject.toml MANIFEST.in README.md LICENSE .ci/install)

.PHONY: help demo check test full sanitize lint docs format install clean
help:
	@echo "make demo     train a small Llama on 2 local ranks: eager, without and with overlap, side by side"
	@echo "make check    lint, types, words, and the pure tests: 2 minutes"
	@echo "make test     with the tests on ranks and of programs, by WORKERS=$(WORKERS) processes of pytest: 15 minutes"
	@echo "make full     everything: also fuzz, families, soak, installs, examples, benchmarks, other releases of torch"
	@echo "make torch-2.15.0   make test with that release, in .venv-2.15.0; once that is there, a part of make full"
	@echo "make sanitize the CPU runtime under ASan and UBSan, then under TSan, with tests of ranks: half an hour"
	@echo "make lint     ruff, clang-format, pyrefly, words   make format   let ruff and clang-format rewrite"
	@echo "make docs     the documentation as a site in build/docs; a broken link fails"
	@echo "make install  set up .venv and install the package make clean    remove .venv and all that was built"

demo: $(VENV)/.package
	@$(BIN)/python examples/llama_tp/demo.py $(ARGS)

# With ARGS, all tests that these name; else those of the tier.
pytest = $(BIN)/python -m pytest $(if $(ARGS),$(ARGS),-n $(WORKERS) --tier $(1) tests) $(PYTEST)

check: lint
	@$(call pytest,check)

test: $(VENV)/.package $(VENV)/.test
	@$(call pytest,test)

full: lint
	@$(call pytest,full)
	@for other in $(OTHERS); do $(MAKE) --no-print-directory torch-$$other || exit 1; done

# `make torch-2.15.0`: the tests of `make test` with another release of torch, in .venv-2.15.0.
torch-%:
	@TORCH=$* $(MAKE) --no-print-directory VENV=.venv-$* test

# On the objects of csrc/bindings that the installation has left. With ARGS, the tests that these name.
sanitize: $(VENV)/.package $(VENV)/.test
	@for kind in address thread; do \
		$(BIN)/python build_tools/sanitize.py $$kind build/sdist/tree/build/temp.* $(ARGS) || exit 1; done

# The type checker looks ub_overlap up where it is installed.
lint: $(VENV)/.package $(VENV)/.lint $(VENV)/.test
	@$(BIN)/ruff check $(PY_DIRS) setup.py
	@$(BIN)/ruff format --check $(PY_DIRS) setup.py
	@$(if $(CXX_FILES),$(BIN)/clang-format --dry-run -Werror $(CXX_FILES),:)
	@$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	@$(BIN)/python .ci/vocabulary

docs: $(VENV)/.package $(VENV)/.docs
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "docs: build/docs/index.html"

format: $(VENV)/.base $(VENV)/.lint
	@$(BIN)/ruff check --fix $(PY_DIRS) setup.py
	@$(BIN)/ruff format $(PY_DIRS) setup.py
	@$(if $(CXX_FILES),$(BIN)/clang-format -i $(CXX_FILES),:)

install: $(VENV)/.package

$(VENV)/.base: .ci/setup .ci/torch.txt .ci/build.txt
	@.ci/setup base $(VENV) $(PYTHON)
	@touch $@

$(VENV)/.test: $(VENV)/.base .ci/test.txt $(wildcard tests/models/requirements.txt)
	@.ci/setup test $(VENV) $(PYTHON)
	@touch $@

$(VENV)/.docs: $(VENV)/.base .ci/docs.txt
	@.ci/setup docs $(VENV) $(PYTHON)
	@touch $@

$(VENV)/.lint: $(VENV)/.base .ci/lint.txt
	@.ci/setup lint $(VENV) $(PYTHON)
	@touch $@

# Through the sdist, like users. Compiled objects are kept.
$(VENV)/.package: $(VENV)/.base $(SOURCES)
	@echo "setup: building and installing ub_overlap"
	@.ci/install $(BIN)/python
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name '*.egg-info' -o -name __pycache__ -not -path './.git/*' | xargs rm -rf
