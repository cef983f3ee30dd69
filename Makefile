# make demo and make test are all that a new user needs; both make .venv and install the project into it.
# PYTHON=… picks the Python; otherwise the first of these that is 3.10 or newer.

ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11 python3.10 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
endif
BIN := .venv/bin
STAMPS := .venv/stamps
SOURCES := $(shell find src native -type f -not -name '*.pyc' -not -name '*.so' 2>/dev/null) pyproject.toml CMakeLists.txt README.md LICENSE
PROMPT ?= Why is the sky blue? Answer in two sentences.

# Requirements as pyproject.toml lists them: the only place that does. pip brings a TOML reader for Python 3.10.
REQUIREMENTS = $(BIN)/python -c 'import sys; \
	exec("try:\n import tomllib\nexcept ImportError:\n from pip._vendor import tomli as tomllib"); \
	p = tomllib.load(open("pyproject.toml", "rb")); \
	print("\n".join(p["build-system"]["requires"] if sys.argv[1] == "build" else p["project"]["optional-dependencies"][sys.argv[1]]))'

.PHONY: demo test test-arm test-cuda deps install model sanitize bench bench-cpu llama-server docs clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

demo: install  ## fetch the default model, answer a prompt
	$(BIN)/nano-vllm pull smollm2
	$(BIN)/nano-vllm run --temperature 0 --max-tokens 128 "$(PROMPT)" </dev/null

test: install $(STAMPS)/dev model  ## all tests
	$(BIN)/python -m pytest $(ARGS)

install: $(STAMPS)/project  ## the project, into .venv

model: install  ## the default model, into the cache folder
	$(BIN)/nano-vllm pull smollm2

sanitize: install $(STAMPS)/dev  ## the native part under the address and undefined-behaviour sanitizers
	PATH="$(CURDIR)/$(BIN):$$PATH" bash native/sanitize.sh

test-arm: install $(STAMPS)/dev model  ## the native tests on emulated AArch64 (root on Debian, or its cross compiler and qemu)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash native/arm.sh $(ARGS)

test-cuda:  ## the CUDA backend's tests on a card, with the Python that has PyTorch and Triton for it (PYTHON=…)
	PYTHONPATH=src TRITON_INTERPRET=0 $(PYTHON) -m pytest -q tests/cuda $(ARGS)

bench: bench-cpu

# llama.cpp's own code for AMX ends the process (tilezero before a tile is configured, in llama-cpp-python 0.3.36).
LLAMA_FLAGS = -DGGML_NATIVE=ON -DCMAKE_C_FLAGS=-U__AMX_INT8__ -DCMAKE_CXX_FLAGS=-U__AMX_INT8__

bench-cpu: install  ## beside its peers, in one run; builds llama-cpp-python (minutes)
	$(REQUIREMENTS) bench | CMAKE_ARGS="$(LLAMA_FLAGS)" $(BIN)/pip install --quiet --no-binary llama-cpp-python -r /dev/stdin
	$(BIN)/python -m benchmarks.cpu $(ARGS)

llama-server: install  ## llama.cpp's server for bench-cpu, into .venv/bin, from llama-cpp-python's source (minutes)
	rm -rf build/llama.cpp && mkdir -p build/llama.cpp
	$(BIN)/pip download --quiet --no-deps --no-binary llama-cpp-python --dest build/llama.cpp \
		$$($(REQUIREMENTS) bench | grep llama-cpp-python)
	tar xzf build/llama.cpp/llama_cpp_python-*.tar.gz --directory build/llama.cpp --strip-components 1
	PATH="$(CURDIR)/$(BIN):$$PATH" && cd build/llama.cpp && cmake -S vendor/llama.cpp -B build -G Ninja \
		-DCMAKE_BUILD_TYPE=Release $(LLAMA_FLAGS) -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \
		-DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF && cmake --build build --target llama-server
	cp build/llama.cpp/build/bin/llama-server $(BIN)/

docs: install  ## rewrite docs/cli.md from the commands' own flags
	$(BIN)/python docs/write_cli.py

clean:  ## remove .venv and what was built; downloaded models stay
	rm -rf .venv build dist

# What pip cannot bring: a compiler, and on Debian the parts of Python that it packs separately.
deps:  ## install what is missing from Debian's packages (root), or say what to install
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
		|| { echo "No Python 3.10 or newer$(if $(PYTHON), as $(PYTHON)): install one, or name it with PYTHON=…"; exit 1; }
	@missing=""; \
	$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || missing="$$missing python3-venv"; \
	$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))' \
		|| missing="$$missing python3-dev"; \
	command -v c++ >/dev/null || missing="$$missing g++"; \
	test -z "$$missing" && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; \
	else echo "Missing:$$missing. Install these (on Debian and Ubuntu: sudo apt-get install$$missing), then try again."; exit 1; fi

$(BIN)/python: | deps
	@echo "Making .venv with $(PYTHON)"
	@$(PYTHON) -m venv .venv

# The build's requirements live in .venv and the build folder is kept, so that a change rebuilds only what it touches.
$(STAMPS)/build: pyproject.toml | $(BIN)/python
	@mkdir -p $(STAMPS)
	@{ $(REQUIREMENTS) build; command -v cmake >/dev/null || echo cmake; command -v ninja >/dev/null || echo ninja; } \
		| $(BIN)/pip install --quiet -r /dev/stdin
	@touch $@

$(STAMPS)/project: $(SOURCES) $(STAMPS)/build
	@echo "Building the project and installing it into .venv"
	@$(BIN)/pip install --quiet --no-build-isolation --config-settings=build-dir=build/venv .
	@touch $@

$(STAMPS)/dev: pyproject.toml | $(BIN)/python
	@echo "Installing what the tests need into .venv"
	@mkdir -p $(STAMPS)
	@$(REQUIREMENTS) dev | $(BIN)/pip install --quiet -r /dev/stdin
	@touch $@
