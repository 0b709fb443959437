# Every target makes .venv and installs what it needs first. `make` alone lists them.

PYTHON ?= python3
# One pinned torch for .venv; TORCH_INDEX=<url> takes it from another index, CUDA=1 allows CUDA.
TORCH := torch==2.13.0
export TORCH_INDEX
export CUDA

VENV := .venv
BIN := $(VENV)/bin
# pytest's arguments, e.g. make test ARGS="-k chunk"; JupyterLab's for make lab.
ARGS ?=
# JupyterLab refuses to run as root unless told.
ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

.DEFAULT_GOAL := help
.PHONY: help lab test test-gpu test-kernels check format notebooks clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

lab: $(VENV)/lab.stamp ## open JupyterLab on notebooks/00_start_here.ipynb
	$(BIN)/jupyter lab --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(ROOT) $(ARGS)

test: $(VENV)/test.stamp ## run the tests (those that need a GPU are skipped where there is none)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-gpu: $(VENV)/test.stamp ## run only the tests that need a GPU
	$(BIN)/python -m pytest -m gpu $(ARGS)

test-kernels: $(VENV)/test.stamp ## compile every Triton kernel for GPUs that need not be here
	$(BIN)/python -m oomb.attention.impl.triton.builds $(ARGS)

check: $(VENV)/dev.stamp ## lint, check formatting, types and docstrings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/pydoclint --quiet oomb widgets assets

format: $(VENV)/dev.stamp ## format the code and mend what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks: $(VENV)/lab.stamp ## execute the notebooks again and strip their outputs
	$(BIN)/python -m oomb_widgets.execute_notebooks notebooks

clean: ## remove .venv and everything else that was built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# The stamps: a step runs again only when it did not finish or when pyproject.toml changed.
$(VENV)/venv.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || { \
	  echo "OOMB needs Python 3.11 to 3.13, but $(PYTHON) is" \
	       "$$($(PYTHON) --version 2>/dev/null || echo not there):" \
	       "run make again with PYTHON=<path of such a Python>."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: install its venv module (on Debian and" \
	       "Ubuntu: apt-get install python3-venv) and run make again."; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/torch.stamp: Makefile $(VENV)/venv.stamp
	@echo "Installing $(TORCH)"
	@$(BIN)/python .ci/install_torch.py $(TORCH)
	@touch $@

$(VENV)/%.stamp: pyproject.toml | $(VENV)/torch.stamp
	@echo "Installing oomb with its extra '$*'"
	@# The torch that is there is named again, so that nothing can replace it by a CUDA build.
	@$(BIN)/python -m pip install -q -e '.[$*]' \
	  "$$($(BIN)/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))')"
	@# A folder named oomb in the current one would be taken for the package otherwise.
	@echo "$(CURDIR)" > "$$($(BIN)/python -c 'import sysconfig; \
	  print(sysconfig.get_path("purelib"))')/oomb_checkout.pth"
	@# JupyterLab would otherwise greet a learner with a question about news.
	@test $* != lab || $(BIN)/jupyter labextension disable \
	  @jupyterlab/apputils-extension:announcements >/dev/null 2>&1
	@touch $@
