# `make run` and `make test` set everything up from a bare clone. `make VENV=/path/to/env test` uses an environment that
# exists, and keeps its torch if that is recent enough.
PYTHON ?= python3
VENV ?= .venv
TORCH_SPEC ?= torch==2.13.0
# processes that share the tests, each a file at a time; WORKERS=0 on a GPU, whose memory some tests count
WORKERS ?= 2
LLAMA_CPP_SPEC ?= llama-cpp-python==0.3.36
BIN := $(abspath $(VENV))/bin
RUN_ARGS ?= generate "Copy this text word by word: The owl left the barn at dusk, crossed the river, and came back before \
the farmer woke. The farmer never saw the owl, but he knew that the owl had been there." \
	--model smollm2-135m --drafter ngram --chat --max-tokens 64 --compare-plain

# the repository root stays off sys.path, where kernels/ would shadow another package of that name
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

C_SOURCES := $(wildcard csrc/include/*.h csrc/*.cpp csrc/*.h csrc/*.map csrc/common/* csrc/cpu/* csrc/cuda/* csrc/tests/* \
	examples/*.c)
CTEST_BUILD := build/ctest
TYPES := build/types

.PHONY: run test setup lint types ctest pytest slow format clean llama-cpp

run: setup
	$(BIN)/pad $(RUN_ARGS)

test: lint types ctest pytest

setup: $(VENV)/.pad-installed

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# torch first, by itself: the release that the tests run on, rather than the newest
$(VENV)/.pad-torch: | $(BIN)/python
	$(BIN)/python -c 'import torch; v = torch.__version__.split("."); assert (int(v[0]), int(v[1])) >= (2, 11)' \
	  2>/dev/null || $(BIN)/python -m pip install '$(TORCH_SPEC)'
	touch $@

$(VENV)/.pad-installed: $(VENV)/.pad-torch pyproject.toml setup.py CMakeLists.txt $(filter-out csrc/tests/% examples/%,$(C_SOURCES))
	$(BIN)/python -m pip install -e '.[test]'
	@$(BIN)/python -c 'from pad_engine import native; print(native.missing_reason() or "libpad " + native.version())'
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(filter %.h %.c %.cpp %.cu %.cuh,$(C_SOURCES))

# mypy knows nothing of the mapping of kernels/ to pad_engine.kernels: lay the sources out as they are installed
types: setup
	rm -rf $(TYPES) && mkdir -p $(TYPES)
	cp -rs $(CURDIR)/pad_engine $(TYPES)/pad_engine
	ln -s $(CURDIR)/kernels $(TYPES)/pad_engine/kernels
	cd $(TYPES) && $(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache pad_engine

ctest: setup
	$(BIN)/cmake --fresh -S . -B $(CTEST_BUILD) -G Ninja -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja \
	  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPAD_TESTS=ON -DPAD_SANITIZE=ON
	$(BIN)/cmake --build $(CTEST_BUILD)
	$(BIN)/ctest --test-dir $(CTEST_BUILD) --output-on-failure --no-tests=error

pytest: setup
	$(BIN)/pytest -m "not slow" -n $(WORKERS) --dist loadfile

slow: setup
	$(BIN)/pytest -m slow

# libpad on llama.cpp's logits: make llama-cpp MODEL=model.gguf. The first time llama.cpp is compiled, for many minutes
llama-cpp: setup
	@test -f '$(MODEL)' || { echo 'which model? make llama-cpp MODEL=path/to/model.gguf'; exit 2; }
	$(BIN)/python -c 'import llama_cpp' 2>/dev/null || \
	  CMAKE_ARGS=-DLLAVA_BUILD=OFF $(BIN)/python -m pip install '$(LLAMA_CPP_SPEC)'
	$(BIN)/python examples/llama_cpp_margin.py '$(MODEL)' --check

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(filter %.h %.c %.cpp %.cu %.cuh,$(C_SOURCES))

clean:
	rm -rf build dist *.egg-info pad_engine/libpad.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f $(VENV)/.pad-torch $(VENV)/.pad-installed
