# Nothing is needed but Python 3.11, git and make (a C compiler for test-cuda): every target builds what it uses.

PYTHON ?= python3.11
VENV   := .venv/bin
RUN    := $(VENV)/python

.DEFAULT_GOAL := help
.PHONY: help venv serve check test test-long test-cuda patches lint docs bench bench-aiperf clean

help: ## Show what can be made
	@printf 'usage: make \033[1mtarget\033[0m\n\n'
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \x1b[1m\1\x1b[0m\t\2/p' $(MAKEFILE_LIST) | expand -t 12
	@printf '\nThe first build of an environment takes 2 to 4 minutes and 4.1 GB.\n'

venv: ## Build .venv: vLLM and vLLM-Omni for CPUs, from the lock
	@$(PYTHON) dev/bootstrap.py .venv

serve: venv ## Serve a tiny multimodal model with our scheduler (PORT=8000, PROFILE=chat, ONESHOT=1 to stop by itself)
	@$(RUN) -m dev.serve

check: venv ## Check style and types, and run the tests that start no engine, in .venv (3 minutes)
	@$(RUN) -m dev.test check

test: ## Run the tests on the vLLM of .venv and on that of .venv-latest (PYTEST="-k name" to choose; 14 minutes)
	@$(PYTHON) dev/bootstrap.py
	@$(RUN) -m dev.test test

test-long: ## Run what make test leaves out: more random workloads, longer property tests, all fault points
	@$(PYTHON) dev/bootstrap.py .venv .venv-latest .venv-cuda
	@$(RUN) -m dev.test test-long

test-cuda: ## Run the code for GPUs on a double of CUDA, without a GPU (1.7 GB beside the environments of make test; needs a C compiler)
	@$(PYTHON) dev/bootstrap.py .venv .venv-latest .venv-cuda
	@.venv-cuda/bin/python -m dev.test test-cuda

patches: ## Check patches/: apply, reverse, and vLLM's own tests on the patched trees (20 minutes the first time)
	@$(PYTHON) dev/bootstrap.py
	$(RUN) patches/check.py

lint: venv ## Check style, spelling, prose, types and the direction of imports
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/codespell
	$(VENV)/python -m dev.prose
	$(VENV)/mypy
	$(VENV)/lint-imports

docs: venv ## Build the documentation into site/
	$(VENV)/mkdocs build --strict

bench: ## Run the main benchmarks on the newest vLLM here, for half an hour (arguments: STEP_COST, REALTIME, OVERHEAD)
	@$(PYTHON) dev/bootstrap.py .venv-latest
	.venv-latest/bin/python -m benchmarks.step_cost $(STEP_COST)
	.venv-latest/bin/python -m benchmarks.realtime $(REALTIME)
	.venv-latest/bin/python -m benchmarks.overhead $(OVERHEAD)

bench-aiperf: ## Let AIPerf send requests to stock and ours, on the newest vLLM here (environment of its own; 40 minutes)
	@$(PYTHON) dev/bootstrap.py .venv-latest .venv-aiperf
	.venv-latest/bin/python -m benchmarks.serve --client aiperf

clean: ## Remove the environments, the models and everything else that was built
	rm -rf .venv .venv-latest .venv-cuda .venv-aiperf .venv*.lock .models .logs .cache site dist
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
