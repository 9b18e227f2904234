PYTHON ?= python3
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1# large pages for large tensors: up to a third faster on a CPU

demo: .venv/installed
	.venv/bin/python demo.py

test: .venv/installed
	.venv/bin/python -m pytest -q tests

.venv/installed: requirements.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/pip install --disable-pip-version-check --quiet -r requirements.txt
	touch $@

clean:
	rm -rf .venv .cache runs

.PHONY: demo test clean
