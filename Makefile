# `make demo`, `make test`, `make lint`, `make NAME` for each recipe. All install what they need; `make help` lists them.

PYTHON ?= python3
# The virtual environment to create and use. VENV= (empty): use the active environment as it is.
VENV ?= .venv
VENV_FLAGS ?=
# What pip installs as torch. TORCH= (empty): nothing, for an environment that already has it.
TORCH ?= torch==2.13.0
# A Hub id or a folder. MODEL= (empty): the demo model.
MODEL ?=
# Input of `make fidelity` and `make bench`: rows with `prompt` (or, for the first, `question`).
PROMPTS ?= recipes/data/demo.jsonl
# Maximum rows of a recipe's input.
LIMIT ?=
# More options for `pagedbatch run`.
RUN_FLAGS ?=
# More options for `pagedbatch bench`.
BENCH_FLAGS ?=
TEST_FLAGS ?=

RECIPES := demo greedy pass-at-k beam tiny-pool few-shot hf-dataset workers cluster translate

ifeq ($(strip $(VENV)),)
BIN :=
BIN_PATH :=
PY := $(PYTHON)
SETUP := own-environment
else
BIN := $(VENV)/bin/
BIN_PATH := $(abspath $(BIN)):
PY := $(VENV)/bin/python
SETUP := $(VENV)/.installed
endif

MODEL_SCRIPT := demo_model
translate: MODEL_SCRIPT := annalog_model
# Shell: sets $$model.
FIND_MODEL = model='$(MODEL)'; [ -n "$$model" ] || model=$$($(PY) recipes/$(MODEL_SCRIPT).py) || exit 1

.PHONY: help setup own-environment test lint audit bench fidelity kernels-check gpu-check docs picture paper shards $(RECIPES)

help:
	@echo "make demo                 answer recipes/data/demo.jsonl with SmolLM2-135M-Instruct"
	@echo "make translate            beam search with an encoder-decoder: analogues of molecules, by ANNalog"
	@echo "make test                 run the tests"
	@echo "make lint                 ruff and mypy"
	@echo "make audit                check the pinned dependencies for known vulnerabilities"
	@echo "make bench                compare with Hugging Face's generate on this machine, on PROMPTS; BENCH_FLAGS go to it"
	@echo "make fidelity             compare greedy outputs with Hugging Face's generate, on PROMPTS"
	@echo "make kernels-check        compile the Triton kernels for each GPU target, without a GPU: registers, spills, memory"
	@echo "make gpu-check            test the kernels and the engine on a GPU; DRY=1: at toy size, without one"
	@echo "make docs                 write docs/options.md from the table of options"
	@echo "make picture              draw docs/account.svg again"
	@echo "make paper                compare with the figures of the PagedAttention paper; beam search runs on PROMPTS"
	@echo "make shards               run one input as four shards, as on Slurm, and merge them"
	@echo "make NAME                 run recipes/NAME.toml: $(RECIPES)"
	@echo "variables                 PYTHON VENV VENV_FLAGS TORCH MODEL PROMPTS LIMIT DRY RUN_FLAGS BENCH_FLAGS TEST_FLAGS"

setup: $(SETUP)

$(VENV)/.installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || \
		{ echo "setup: no '$(PYTHON)': install Python 3.11 or newer, or name yours with PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "setup: '$(PYTHON)' is older than Python 3.11: name a newer one with PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "setup: '$(PYTHON)' has no venv module: install it (Debian: python3-venv)" >&2; exit 1; }
	@echo "setup: installing into $(VENV), once" >&2
	@$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	@{ [ -z '$(TORCH)' ] || $(PY) -m pip install $(TORCH); } && $(PY) -m pip install -q -c constraints.txt -e '.[dev]' || \
		{ echo "setup: pip failed for the reason above; it needs a package index that it can reach" >&2; exit 1; }
	@touch $@

# Not `import pagedbatch`: Python finds that in this folder even if it is not installed.
own-environment:
	@$(PY) -c 'import pagedbatch_kernels' 2>/dev/null || \
		{ echo "setup: pagedbatch is not in your environment: pip install -c constraints.txt -e '.[dev]'" >&2; exit 1; }

# A module of tests runs in one process; more than four hardly help, for the longest module takes so long.
test: $(SETUP)
	$(PY) -m pytest -n logical --maxprocesses 4 --dist loadfile $(TEST_FLAGS)

lint: $(SETUP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# In an environment of its own, because pip-audit has other dependencies.
audit: $(SETUP)
	@$(PY) -m venv $(or $(strip $(VENV)),.venv)/audit
	@$(or $(strip $(VENV)),.venv)/audit/bin/python -m pip install -q pip-audit
	@$(or $(strip $(VENV)),.venv)/audit/bin/pip-audit -r constraints.txt --no-deps --disable-pip

bench: $(SETUP)
	@$(FIND_MODEL); $(BIN)pagedbatch bench $(PROMPTS) --model "$$model" $(BENCH_FLAGS)

fidelity: $(SETUP)
	@$(FIND_MODEL); PYTHONPATH=tests $(PY) benchmarks/check_fidelity.py "$$model" $(PROMPTS)

kernels-check: $(SETUP)
	@$(PY) benchmarks/check_kernels.py

gpu-check: $(SETUP)
	@$(PY) benchmarks/gpu_check.py $(if $(DRY),--dry)

$(RECIPES): $(SETUP)
	@mkdir -p out
	@$(FIND_MODEL); \
	set -- $(BIN)pagedbatch run --recipe recipes/$@.toml --model "$$model" $(if $(LIMIT),--limit $(LIMIT)) $(RUN_FLAGS); \
	echo "$$*" >&2; "$$@"

# Runs the tasks of recipes/slurm/shards.sbatch one after the other, then merges. Exit code 3: some rows are errors.
shards: $(SETUP)
	@$(FIND_MODEL); PATH="$(BIN_PATH)$$PATH"; export SLURM_ARRAY_TASK_COUNT=4; \
	for task in 0 1 2 3; do \
		SLURM_ARRAY_TASK_ID=$$task bash recipes/slurm/shards.sbatch recipes/data/demo.jsonl "$$model" out/shards \
			--chat --max-tokens 96 $(if $(LIMIT),--limit $(LIMIT)) $(RUN_FLAGS) || [ $$? = 3 ] || exit 1; \
	done; \
	pagedbatch merge out/shards/part-*.jsonl --output out/shards/answers.jsonl

docs: $(SETUP)
	@$(PY) docs/make_options.py
	@PYTHONPATH=tests $(PY) docs/make_models.py
	@$(PY) docs/make_stats.py

picture: $(SETUP)
	@$(MAKE) pass-at-k RUN_FLAGS="--num-blocks 160 --output out/picture.jsonl --restart $(RUN_FLAGS)"
	@$(PY) docs/make_picture.py out/picture.stats.json docs/account.svg

paper: $(SETUP)
	@$(FIND_MODEL); $(PY) benchmarks/check_paper.py "$$model" $(PROMPTS)

hf-dataset: out/trivia

out/trivia: recipes/data/trivia.jsonl recipes/make_dataset.py | $(SETUP)
	@$(PY) recipes/make_dataset.py $< $@
