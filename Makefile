# Everything runs in a virtual environment that this file makes: only Python (3.11 to 3.13) and make are needed.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
READY = $(VENV)/.ready

.PHONY: help install quickstart examples test test-slow check format bench gpu gpu-check evidence real engines papers docs soak fuzz mutants toy wheel-test clean
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else "expected Python 3.11 to 3.13, got %d.%d: set PYTHON=" % v)'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[all,dev]"
	touch $(READY)

install: $(READY) ## the virtual environment alone

quickstart: $(READY) ## the main job on the embedded toy pair: responses, data, head, sweep, frontier
	$(RUN) -m toolkit.train +experiment=quickstart

test: $(READY) ## the tests, one process per core: minutes
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto --dist worksteal -m "not slow"

test-slow: $(READY) ## the long tests: larger samples, kills at random moments, whole commands
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto --dist worksteal -m slow

check: $(READY) ## format, lint, types
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

format: $(READY) ## put the code into shape
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

bench: $(READY) ## decoding speed against transformers, into outputs/benchmarks.md
	$(RUN) -m benchmarks.speed $(ARGS)

# With $(PYTHON) itself, for the virtual environment's pins are CPU builds: `--help` says what it needs.
gpu: ## exactness and speed on a CUDA device in steps, into outputs/gpu/ (25 minutes; goes on where it ended; ARGS="--help")
	$(PYTHON) -m benchmarks.gpu $(ARGS)

gpu-check: ## exactness on a CUDA device alone
	$(PYTHON) -m benchmarks.gpu exactness $(ARGS)

examples: $(READY) ## the examples/ on the toy pair (4 minutes)
	PATH="$(abspath $(VENV))/bin:$$PATH" PYTHONPATH=. $(SHELL) -ec 'python examples/run_notebook.py examples/first_look.ipynb; \
		for script in custom_generate policy; do python examples/$$script.py; done; \
		for script in head draft need_a_head; do bash examples/$$script.sh; done'

evidence: $(READY) ## the documentation's results, measured again into outputs/evidence/ (ARGS=--small: a few prompts)
	$(RUN) -m benchmarks.evidence $(ARGS)

real: $(READY) ## everything on SmolLM2 135M (PAIR=FOLDER: another pair) and real questions, into outputs/real/ (DATA=FOLDER of questions; ARGS="--help"); two hours
	OMP_WAIT_POLICY=PASSIVE $(RUN) -m benchmarks.real $(if $(DATA),--data $(DATA)) $(ARGS)

engines: $(READY) ## vLLM and llama.cpp beside this package, count for count, into outputs/engines/ (3.4 GB of environments first; ARGS="--help")
	OMP_WAIT_POLICY=PASSIVE $(RUN) -m benchmarks.engines $(ARGS)

papers: $(READY) ## every table and figure of the papers that the toy pair can make, into outputs/papers/
	$(RUN) -m benchmarks.papers $(ARGS)

docs: $(READY) ## the documentation as a site, into outputs/site/; warnings are errors
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

soak: $(READY) ## every stage killed 20 times at random moments: each ends with the uninterrupted output (SOAK_KILLS=N)
	SOAK_KILLS=$${SOAK_KILLS:-20} OMP_NUM_THREADS=1 $(RUN) -m pytest tests/test_soak.py -m slow

fuzz: $(READY) ## 3,000 malformed command lines and calls: right, or one line (FUZZ_INPUTS=N, FUZZ_SEED=N)
	FUZZ_INPUTS=$${FUZZ_INPUTS:-3000} OMP_NUM_THREADS=1 $(RUN) -m pytest tests/test_fuzz.py -m slow

# Goes on where it ended. `mutmut results` lists what no test noticed, `mutmut show NAME` its change; ARGS="NAME..." tries some.
mutants: $(READY) ## one-line changes of the core, and whether the tests notice (mutmut; hours)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[mutants]"
	OMP_NUM_THREADS=1 $(RUN) -m mutmut run $(ARGS)

wheel-test: $(READY) ## wheel and sdist in a fresh environment, used from an empty folder (15 minutes; ARGS=--import-only: half a minute)
	$(RUN) -m tests.wheel $(ARGS)

toy: $(READY) ## train the embedded pair again from scratch (under 90 minutes on 2 cores)
	$(RUN) -m data_gen.toy

clean: ## remove outputs and caches, not the environment
	rm -rf outputs mutants .pytest_cache .mypy_cache .ruff_cache
