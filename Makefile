# See `make help`. Needs Python 3.10 to 3.14 (TensorFlow in dev-all: to 3.13), a C++17 compiler, make
# and pip.
#
#   PYTHON=python3.12 make test    another interpreter
#   MPICC=/opt/mpi/bin/mpicc make  another MPI than the one in PATH or from pip
#   TORCH_INDEX=URL make demo      where pip finds builds of torch for CPUs only

PYTHON ?= python3
VENV ?= .venv
JOBS ?= $(shell nproc)
BIN := $(CURDIR)/$(VENV)/bin
SOURCES := hororing tools packaging setup.py tests examples benchmarks

# Tests of `make test-tensorflow TF=2.19.1`, and their environment.
TF ?= 2.19.1
OTHER := $(CURDIR)/build/tensorflow-$(TF)
TENSORFLOW_TESTS := $(wildcard tests/python/tensorflow/test_tensorflow_*.py)

# The environment of `make lint`.
LINT := $(CURDIR)/build/lint
lint format: export PATH := $(LINT)/bin:$(PATH)

# Where `make bench` keeps MPICH, and Horovod.
MPICH := $(CURDIR)/build/mpich
HOROVOD := $(CURDIR)/build/horovod

# Tools of the environment first: mpirun, cmake, pybind11 come from it where the machine has none.
export PATH := $(BIN):$(PATH)

# Lets mpirun of Open MPI run anywhere: as root (containers), with more ranks than cores,
# and with room for the engine's thread. Other MPIs ignore it.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_MCA_rmaps_default_mapping_policy := slot:oversubscribe
export PRTE_MCA_hwloc_default_binding_policy := none

# Hundreds of processes of the tests import the same files: compile them once.
export PYTHONDONTWRITEBYTECODE :=

# One build folder for the package in place and for the C++ tests.
CORE := build/editable
TESTING := CMAKE_ARGS="-DHORORING_TESTING=ON $(CMAKE_ARGS)"
# Some tests mostly wait.
CTEST := --output-on-failure --no-tests=error --parallel $(shell expr $(JOBS) + 1)
PYTEST := -n $(JOBS)

# ThreadSanitizer of older compilers fails with much address randomisation.
NO_ASLR := $(shell setarch -R true 2>/dev/null && echo setarch -R)

.DEFAULT_GOAL := help
.PHONY: help demo dev dev-all build programs test test-all test-cpp test-py test-tensorflow tsan asan soak lint format typecheck bench bench-mpich bench-horovod simulate pictures kernels wheel docs docs-site walk clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo  ## train a CNN on real digits with two processes
	@began=$$(date +%s); hororun -np 2 python examples/torch_digits.py && \
	  echo "trained in $$(($$(date +%s) - began)) s"

dev: $(VENV)/.dev  ## .venv with PyTorch and the tests' tools, the package built in place
	@echo "now: source $(VENV)/bin/activate"

dev-all: $(VENV)/.dev-all  ## also TensorFlow, Keras, JAX and what the full tier uses: gigabytes
	@echo "now: source $(VENV)/bin/activate"

build: $(VENV)/.dev  ## build the core in place again
	$(TESTING) pip install --quiet --no-build-isolation --no-deps --editable .

# Programs and libraries that Python tests use beside the package, and the C++ tests.
programs: build
	cmake --build $(CORE) --parallel $(JOBS)

# The three tiers are described in CONTRIBUTING.md.
test: test-cpp tsan test-py  ## the tests that every change must pass

test-all: test-cpp tsan asan programs  ## all tests: before a change of engine, transports or adapters is done
	pytest $(PYTEST) --full
	$(MAKE) test-tensorflow

test-cpp: programs  ## C++ tests, as installed
	ctest --test-dir $(CORE) $(CTEST)

tsan: $(VENV)/.dev  ## C++ tests with threads under ThreadSanitizer
	cmake --preset tsan
	cmake --build --preset tsan --parallel $(JOBS)
	$(NO_ASLR) ctest --test-dir build/tsan $(CTEST)

asan: $(VENV)/.dev  ## C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer
	cmake --preset asan
	cmake --build --preset asan --parallel $(JOBS)
	ctest --test-dir build/asan $(CTEST)

test-py: programs  ## Python tests of the push tier
	pytest $(PYTEST)

# Nothing is built for it: one plug-in serves all versions.
test-tensorflow: build $(OTHER)/.ready  ## Python tests of TensorFlow's adapter on another one: TF=2.19.1
	PATH="$(OTHER)/bin:$$PATH" $(OTHER)/bin/python -m pytest -k tensorflow $(TENSORFLOW_TESTS)

soak: build  ## random schedules of collectives, then jobs with injected failures: 10 minutes each
	python tests/python/support/schedules.py --ranks 4 --minutes 10
	python tests/python/support/chaos.py --minutes 10
	python tests/python/support/nemesis.py --minutes 10
	if bash tests/hosts.sh --check; then python tests/python/support/nemesis.py --minutes 10 --hosts 3; fi

# mypy without the frameworks' types; `make typecheck` has them, and is stricter.
lint: $(LINT)/.ready  ## style, types and prose: an environment of its own, without frameworks or a build
	ruff check $(wildcard $(SOURCES))
	ruff format --check $(wildcard $(SOURCES))
	git ls-files -co --exclude-standard '*.cc' '*.h' '*.inc' | xargs clang-format --dry-run -Werror
	codespell $$(git ls-files -co --exclude-standard)
	$(LINT)/bin/python tools/lint_prose.py
	$(LINT)/bin/python tools/lint_docstrings.py
	mypy --cache-dir $(LINT)/mypy --python-executable $(LINT)/bin/python --allow-subclassing-any \
	  --allow-untyped-decorators --no-warn-return-any --no-warn-unused-ignores
	shellcheck --severity=warning $$(git ls-files '*.sh' .ci/run)
	if command -v hadolint >/dev/null; then hadolint -c packaging/docker/hadolint.yaml packaging/docker/*.Dockerfile; fi

typecheck: $(VENV)/.dev  ## mypy, strict, with the types of PyTorch
	$(BIN)/mypy

format: $(LINT)/.ready  ## ruff and clang-format, in place
	ruff check --fix $(wildcard $(SOURCES))
	ruff format $(wildcard $(SOURCES))
	git ls-files -co --exclude-standard '*.cc' '*.h' '*.inc' | xargs clang-format -i

# ONLY="sums sets" runs some parts; REMARK="quiet machine" is written into the results.
bench: build  ## against all peers, on 2 and 4 ranks: JSON, tables, plots (half an hour)
	$(MAKE) bench-mpich || echo "without MPICH"
	$(MAKE) bench-horovod || echo "without Horovod"
	python benchmarks/bench.py --remark "$(REMARK)" $(if $(ONLY),--only $(ONLY))
	python benchmarks/table.py --write
	python benchmarks/plots.py

simulate: programs  ## training on 8 to 2,048 ranks through the real planner and coordinator
	python benchmarks/simulate.py

# A run of MPICH needs an environment in which everything uses it; only its layer is built.
bench-mpich: build
	test -x $(MPICH)/bin/mpicc || { $(BIN)/python -m venv $(MPICH) && \
	  $(MPICH)/bin/pip install --quiet mpich mpi4py; }
	cmake -S . -B $(MPICH)/core -DCMAKE_BUILD_TYPE=Release -DHORORING_MPICC=$(MPICH)/bin/mpicc
	cmake --build $(MPICH)/core --target hororing_mpi_mpich --parallel $(JOBS)
	cp $(MPICH)/core/libhororing_mpi_mpich.so hororing/lib/
	$(BIN)/python -c 'import site; print("$(CURDIR)", site.getsitepackages()[0], sep="\n")' \
	  > "$$($(MPICH)/bin/python -c 'import site; print(site.getsitepackages()[0])')/hororing.pth"
	touch $(MPICH)/.ready

# Takes minutes, at first and after a change of torch or MPI. The environment only gets Horovod's
# dependencies, and most have them.
bench-horovod: build  ## Horovod, built from its sdist into build/horovod
	$(BIN)/pip install --quiet cffi cloudpickle packaging psutil pyyaml
	$(BIN)/python tools/build_horovod.py $(HOROVOD) $(JOBS)

# The viewer's picture needs Chromium, and npm the first time (tests/python/support/timeline_viewer.py).
pictures: build  ## all pictures of the pages, from committed results and a recorded terminal
	python benchmarks/plots.py
	python benchmarks/stragglers.py show
	python benchmarks/digits.py show
	python benchmarks/timeline_plot.py
	python tools/recording.py

kernels: $(VENV)/.dev  ## csrc/gpu/kernels.inc from kernels.cu, with nvcc: NVCC=/usr/local/cuda/bin/nvcc
	python tools/kernels.py $(NVCC)

wheel: $(VENV)/bin/python  ## dist/: sdist, and a wheel for every MPI and Python
	$(BIN)/python packaging/wheel/make_wheel.py

docs: build  ## docs/configuration.md from the table of knobs
	python -m hororing config --markdown > docs/configuration.md.new
	mv docs/configuration.md.new docs/configuration.md

docs-site: build  ## build/site: all pages, and the public names from their docstrings
	$(BIN)/python -c 'import mkdocstrings, material' 2>/dev/null || $(BIN)/pip install --quiet \
	  'mkdocs==1.6.1' 'mkdocs-material==9.8.2' 'mkdocstrings[python]==1.0.8'
	NO_MKDOCS_2_WARNING=1 TF_CPP_MIN_LOG_LEVEL=3 python -m mkdocs build --strict

walk: build  ## build/walk.md: the functions on one gradient's path, from a trace
	python tools/walk.py

clean:  ## everything that was built, the environment too
	rm -rf build dist *.egg-info hororing/lib hororing/_*.abi3.so $(VENV)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; assert (3, 10) <= sys.version_info, "Python 3.10 or later"'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml
	$(BIN)/python tools/demo.py $(TORCH_INDEX)
	touch $@

# CMake first, so that it already builds here: after another one it would compile everything again.
$(VENV)/.dev $(VENV)/.dev-all: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install 'cmake>=3.20'
	$(TESTING) $(BIN)/python -m pip install --editable '.[$(@:$(VENV)/.%=%)]'
	touch $@ $(VENV)/.dev $(VENV)/.demo

$(LINT)/.ready: pyproject.toml
	$(PYTHON) -m venv $(LINT)
	$(LINT)/bin/python tools/requirements.py lint > $(LINT)/requirements.txt
	$(LINT)/bin/python -m pip install --quiet -r $(LINT)/requirements.txt
	touch $@

$(OTHER)/.ready: $(VENV)/bin/python
	$(BIN)/python -m venv $(OTHER)
	$(OTHER)/bin/pip install --quiet tensorflow-cpu==$(TF) 'cffi>=1.15' cloudpickle ml-dtypes \
	  scikit-learn psutil pytest pytest-timeout hypothesis
	echo $(CURDIR) > "$$($(OTHER)/bin/python -c 'import site; print(site.getsitepackages()[0])')/hororing.pth"
	touch $@
