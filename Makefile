# Needs Python 3.11 or newer and nothing else; everything is installed into .venv. pip's own variables (PIP_CONSTRAINT, ...) apply.
#   make train   trains a small model on real English on the CPU; more words of the configuration: make train ARGS='train.num_steps=50'
#   make train-images  trains a VAE and then a tiny FLUX.2 on pictures that libraries ship, on the CPU, and draws what they make
#   make tune    a small grid of such trainings, two at a time; more words: make tune ARGS='--max-concurrent 1'
#   make test    runs the tests, those that start a Ray one after the other behind the others; some: make test ARGS=tests/data
#   make drill   kills parts of a training at random for the better part of an hour, and compares it with an undisturbed one
#   make check   runs the linters, the type checker, the import rules, the checks of documents and deployment files

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin

.PHONY: train train-images tune test check drill clean

train: .venv/installed
	$(BIN)/python jobs/train.py --profile cpu --model lm-tiny $(ARGS)

train-images: .venv/installed
	$(BIN)/python jobs/train_images.py $(ARGS)

tune: .venv/installed
	$(BIN)/python jobs/tune.py tune_spaces/tiny_grid.yaml --profile cpu --model lm-tiny $(ARGS)

test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not ray' --numprocesses=auto --dist=loadfile $(ARGS) || [ $$? -eq 5 ]
	$(BIN)/python -m pytest -m ray $(ARGS) || [ $$? -eq 5 ]

check: .venv/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_docs.py tests/deploy

drill: .venv/installed
	$(BIN)/python benchmarks/drill.py $(ARGS)
	$(BIN)/python benchmarks/render.py

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache

.venv/bin/pip:
	@$(if $(PYTHON),$(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "fluxray needs Python 3.11 or newer, and '$(or $(PYTHON),python3)' is not; try make PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -m venv .venv || \
		{ rm -rf .venv; echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }

.venv/installed: pyproject.toml | .venv/bin/pip
	$(BIN)/python -m pip install -e '.[test]'
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install -e '.[dev]'
	touch $@
