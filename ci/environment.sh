#!/usr/bin/env bash
# Creates .venv with the versions that were verified together: `ci/environment.sh cpu|cuda [FORK]`. Installs what moved: all
# where the pins did or a fork is to go, else only FORK, a git checkout of torchao that replaces the pinned one.
# In your own project, set `pins` to its file of pinned versions, and install 'fp8-harness[train]' instead of '.[train]'.
set -euo pipefail
build=${1:?cpu or cuda}
fork=${2:-}
pins=ci/constraints.txt
if ! cmp --silent "$pins" .venv/pins.txt || { [ -z "$fork" ] && [ -e .venv/fork.txt ]; }; then
  python3 -m venv --clear .venv
  if [ "$build" = cpu ]; then # PyPI's torch is the CUDA build: gigabytes that a runner without a GPU does not need
    .venv/bin/pip install --quiet --index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' "$pins")"
  fi
  .venv/bin/pip install --quiet --constraint "$pins" --editable '.[train]'
  cp "$pins" .venv/pins.txt
fi
if [ -z "$fork" ]; then exit 0; fi
commit=$(git -C "$fork" rev-parse HEAD)
if [ "$commit" = "$(cat .venv/fork.txt 2>/dev/null)" ]; then exit 0; fi
.venv/bin/pip install --quiet setuptools wheel # its setup.py imports the installed torch
USE_CPP=0 .venv/bin/pip install --quiet --no-build-isolation --no-deps --force-reinstall "$fork"
echo "$commit" > .venv/fork.txt
