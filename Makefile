PYTHON ?= python3
# what is imported is compiled then, and kept; pip would compile five times as much
unexport PYTHONDONTWRITEBYTECODE
# glibc keeps what a step frees, in large pages, for the next one: on a CPU this saves thousands of page faults a step
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=8589934592

demo: .venv/installed
	.venv/bin/python demo.py

test: .venv/installed
	.venv/bin/python -m pytest -q -n 2 --dist=loadgroup --durations=20 tests

.venv/installed: requirements.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/pip install --disable-pip-version-check --quiet --no-compile -r requirements.txt
	touch $@

clean:
	rm -rf .venv .cache runs

.PHONY: demo test clean
