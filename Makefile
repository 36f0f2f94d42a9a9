# Two commands do everything on a fresh machine: `make run` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL := examples/pycode/model
PLANS := plans
# Two processes, a processor each; the tests of a file stay together because they share engines.
PARALLEL := -n 2 --dist loadfile

.PHONY: run test pytest test-fast test-slow lint bench clean

run: $(PLANS)/manifest.json
	$(BIN)/eesd-run --engine-dir $(PLANS) --prompt-file examples/pycode/prompt.txt --max-new-tokens 160 --compare

$(PLANS)/manifest.json: $(VENV)/installed
	$(BIN)/eesd-export --model $(MODEL) --dtype float32 --output $(PLANS)

# Lint runs beside the tests: type checking takes one processor for a minute.
test: $(VENV)/installed
	$(MAKE) --no-print-directory --jobs 2 lint pytest

pytest: $(VENV)/installed
	$(BIN)/python -m pytest $(PARALLEL)

test-fast: $(VENV)/installed
	$(BIN)/python -m pytest $(PARALLEL) -m "fast and not slow"

test-slow: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src/eesd tests

bench: $(PLANS)/manifest.json
	$(BIN)/eesd-bench --engine-dir $(PLANS) --output bench-results --overwrite

# src/eesd links to the top-level folders, so an editable install sees new files without being made again.
$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(PLANS) build
