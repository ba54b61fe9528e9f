# The two commands a new machine needs: `make smoke` and `make test`. Both set up .venv first when it is missing or old.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEVICE := cuda
# What runs cases, and what tests and documents need besides: `make smoke` does not wait for the second.
READY := $(VENV)/.ready
DEV := $(VENV)/.dev
# Where torch comes from if not from PyPI: TORCH_INDEX=https://download.pytorch.org/whl/cpu has the build for CPUs, which
# counts as newer than the same version of PyPI. So one call of pip finds all, and everything is resolved once.
TORCH_INDEX :=
INSTALL = -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# torchtitan and what it imports stay out of .venv. TORCHTITAN: a folder, or a git repository with @COMMIT.
TITAN_VENV := .venv-torchtitan
TORCHTITAN := https://github.com/pytorch/torchtitan@b5bcd76c66d0acb1a08b176d9639425bc55e0b2a

TRANSFORMERS_VENV := .venv-transformers
TRANSFORMERS_READY := $(TRANSFORMERS_VENV)/.ready

# The suite starts hundreds of interpreters: bytecode is kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: smoke gloo blockwise test sweep unit pythons gpu-evidence browser torchtitan .venv-torchtitan transformers versions torchao-tests lint format docs clean

smoke: $(READY)  ## run the smoke tier end to end on the CPU and print the verdict table
	$(BIN)/fp8-harness run smoke --device cpu

gloo: $(READY)  ## run the tiers smoke and gloo over torch's gloo, for every night
	$(BIN)/fp8-harness run smoke gloo --backend gloo

blockwise: $(READY)  ## run tier blockwise, for every night
	$(BIN)/fp8-harness run blockwise

test: $(DEV)  ## run the test suite, without the sweeps
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not sweep" --durations 40 --durations-min 5 tests

sweep: $(DEV)  ## run the sweeps, for every night: long tests of compiled runs, mutation testing, properties on many examples
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m sweep tests
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -q -n 2 -m "not sweep" tests/unit $(wildcard tests/plugins/*/unit)

unit: $(DEV)  ## run the tests that need no torch and no other program
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not sweep and not programs" tests/unit $(wildcard tests/plugins/*/unit)

gpu-evidence: $(READY)  ## what the visible GPUs can prove, stored under golden/<class>/; DEVICE=cpu rehearses
	$(BIN)/fp8-harness dev evidence all --device $(DEVICE) $(EVIDENCE)

browser:  ## install the Chromium of tests/browser where none is, from Debian's packages; as root
	@for name in chromium-headless-shell chromium chromium-browser google-chrome; do \
		command -v $$name && exit 0; \
	done; \
	apt-get update -q && apt-get install -qy --no-install-recommends chromium-headless-shell fonts-dejavu-core

torchtitan: $(TITAN_VENV)  ## run the tests of the torchtitan target, in an environment of its own, for every night: TORCHTITAN=a folder or URL@COMMIT
	$(TITAN_VENV)/bin/python -m pytest -q tests/plugins/torchtitan tests/worker/test_unshards.py
	$(TITAN_VENV)/bin/python -m pytest -q -m sweep -k torchtitan tests/plugins/bugs/acceptance/test_upstream_scripts.py
	$(TITAN_VENV)/bin/fp8-harness run torchtitan

# A commit that the target cannot drive is refused before anything is installed. The CUDA build of torch, 5 GB, runs on a CPU.
$(TITAN_VENV): $(READY)
	$(BIN)/python ci/torchtitan.py get "$(TORCHTITAN)" $(TITAN_VENV)-source
	test -d $(TITAN_VENV) || $(PYTHON) -m venv $(TITAN_VENV)
	$(TITAN_VENV)/bin/python $(INSTALL) -c ci/constraints-torchtitan.txt -e '.[train,dev]' torch_remat \
		-e "$$($(BIN)/python ci/torchtitan.py get "$(TORCHTITAN)" $(TITAN_VENV)-source)"

transformers: $(TRANSFORMERS_READY)  ## run examples/hf_llama, examples/scripts and the FP8 loader of transformers, in an environment of its own, for every night
	$(TRANSFORMERS_VENV)/bin/python -m pytest -q -m sweep tests/acceptance/test_hf_llama.py
	$(TRANSFORMERS_VENV)/bin/python -m pytest -q tests/plugins/exec/acceptance/test_scripts.py
	$(TRANSFORMERS_VENV)/bin/python -m pytest -q tests/plugins/handoff/worker/test_consumers.py

# Other versions of torch and torchao, each in an environment of its own, pinned by `fp8-harness constraints --for`. PyPI has
# CUDA builds of torch 2.14 and later only, of 5 GB each, which run on a CPU.
TIER_2.15 := pr
VERSIONS := $(patsubst ci/constraints-torch-%.txt,torch-%,$(wildcard ci/constraints-torch-*.txt))

versions: $(VERSIONS)  ## all of them, for every night: whole pr with the newest torch, smoke with the others, conformance

$(VERSIONS): torch-%: .venv-torch-%/.ready  ## as `make torch-2.15`
	.venv-torch-$*/bin/fp8-harness run $(or $(TIER_$*),smoke)
	.venv-torch-$*/bin/fp8-harness dev conformance
	.venv-torch-$*/bin/python -m pytest -q tests/worker/test_internals.py

.venv-torch-%/.ready: pyproject.toml ci/constraints.txt ci/constraints-torch-%.txt
	$(PYTHON) -m venv .venv-torch-$*
	.venv-torch-$*/bin/python $(INSTALL) -c ci/constraints.txt -e .
	.venv-torch-$*/bin/fp8-harness constraints --for torch-$* > .venv-torch-$*/constraints.txt
	.venv-torch-$*/bin/python $(INSTALL) -c .venv-torch-$*/constraints.txt -e '.[dev]'
	touch $@

# Triton is that of the pinned torch; with ml-dtypes its interpreter runs torchao's kernels. Tests import the others.
TORCHAO_VENV := .venv-torchao-tests
TORCHAO_NEEDS := triton==3.7.1 ml-dtypes==0.6.0 fire parameterized tabulate tqdm

torchao-tests: $(TORCHAO_VENV)/.ready  ## torchao's own tests on the virtual device: TORCHAO=a checkout or its unpacked sdist
	@test -n "$(TORCHAO)" || { echo "give a checkout of torchao: make torchao-tests TORCHAO=../ao" >&2; exit 2; }
	$(TORCHAO_VENV)/bin/python -m pytest -q tests/plugins/exec/worker/test_kernels.py
	$(TORCHAO_VENV)/bin/python ci/torchao_tests.py "$(TORCHAO)" $(if $(RESULTS),--results "$(RESULTS)")

$(TORCHAO_VENV)/.ready: pyproject.toml ci/constraints.txt
	$(PYTHON) -m venv $(TORCHAO_VENV)
	$(TORCHAO_VENV)/bin/python $(INSTALL) -c ci/constraints.txt -e '.[train,dev]' $(TORCHAO_NEEDS)
	touch $@

# The versions of Python of pyproject.toml that are here, by pyenv or on PATH.
MINORS := 11 12 13 14
python_of = $(firstword $(wildcard $(HOME)/.pyenv/versions/3.$(1).*/bin/python) $(shell command -v python3.$(1)))

pythons: $(foreach minor,$(MINORS),python-3.$(minor))  ## tests/unit, which need no torch, with every Python, for every night

python-3.%:
	$(if $(call python_of,$*),$(MAKE) --no-print-directory .venv-python-3.$*/.ready,@echo "not run: no Python 3.$* is here")
	$(if $(call python_of,$*),.venv-python-3.$*/bin/python -m pytest -q -n 2 -m "not sweep and not programs" tests/unit $(wildcard tests/plugins/*/unit))

.venv-python-3.%/.ready: pyproject.toml ci/constraints.txt
	$(call python_of,$*) -m venv .venv-python-3.$*
	.venv-python-3.$*/bin/python $(INSTALL) -c ci/constraints.txt -e '.[unit]'
	touch $@

# ci/words.txt has words and phrases of ours: in pages, and in messages of the harness. Spelling is checked everywhere.
PAGES = README.md CONTRIBUTING.md CHANGELOG.md $(wildcard docs/*.md docs/plugins/*.md)
OUR_WORDS = $(BIN)/codespell -D ci/words.txt --ignore-regex '`[^`]*`|\{[^}]*\}' -r "$$($(BIN)/python ci/messages.py --regex)"

lint: $(DEV)  ## ruff, mypy and spelling, as CI runs them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(OUR_WORDS) $(PAGES)
	$(BIN)/python ci/messages.py | $(OUR_WORDS) -
	$(BIN)/mypy

format: $(DEV)  ## let ruff rewrite the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DEV)  ## render docs/ as a site into site/
	$(BIN)/python -m mkdocs build --strict --quiet

$(READY): pyproject.toml ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) -c ci/constraints.txt -e '.[train]'
	touch $@

$(DEV): $(READY)
	$(BIN)/python $(INSTALL) -c ci/constraints.txt -e '.[dev]'
	touch $@

$(TRANSFORMERS_READY): pyproject.toml ci/constraints.txt ci/constraints-transformers.txt
	$(PYTHON) -m venv $(TRANSFORMERS_VENV)
	$(TRANSFORMERS_VENV)/bin/python $(INSTALL) \
		-c ci/constraints.txt -c ci/constraints-transformers.txt -e '.[scripts,dev]'
	touch $@

clean:
	rm -rf site $(VENV) $(TITAN_VENV) $(TITAN_VENV)-source $(TRANSFORMERS_VENV) $(TORCHAO_VENV) .venv-torch-* .venv-python-* .pytest_cache .mypy_cache .ruff_cache .hypothesis
