# make demo | test | test-slow | bench | lint: each sets up what it needs in its own virtual environment.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin

# pinned, so that every machine tests the same; without byte-compiling, which takes a minute
TORCH := torch==2.13.0 triton==3.7.1
BUILD := setuptools cmake ninja pybind11
SOURCES := $(shell find csrc -type f) CMakeLists.txt setup.py pyproject.toml

.PHONY: demo test test-slow bench lint format clean
demo: $(VENV)/installed
	rm -rf runs/demo
	$(BIN)/python -m bench.demo runs/demo

test: $(VENV)/installed
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(VENV)/installed
	$(BIN)/python -m pytest -m slow

bench: $(VENV)/installed
	$(BIN)/python -m bench
	$(BIN)/python -m bench report

lint: $(VENV)/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.h' '*.cpp' '*.cu')

format: $(VENV)/installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $$(git ls-files '*.h' '*.cpp' '*.cu')

clean:
	rm -rf build $(VENV) pcsr_fast/*.so

$(VENV)/packages:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile $(TORCH) $(BUILD)
	touch $@

# editable: the compiled library stands in pcsr_fast/, and only what changed is compiled again
$(VENV)/installed: $(VENV)/packages $(SOURCES)
	$(BIN)/pip install --quiet --no-compile --no-build-isolation --editable '.[test,lint,report]'
	touch $@
