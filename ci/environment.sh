#!/usr/bin/env bash
# Creates .venv with the versions that were verified together, unless it was restored from a cache: `ci/environment.sh cpu|cuda`.
# In your own project, set `pins` to its file of pinned versions, and install 'fp8-harness[train]' instead of '.[train]'.
set -euo pipefail
build=${1:?cpu or cuda}
pins=ci/constraints.txt
if cmp --silent "$pins" .venv/pins.txt; then exit 0; fi
python3 -m venv --clear .venv
if [ "$build" = cpu ]; then # PyPI's torch is the CUDA build: gigabytes that a runner without a GPU does not need
  .venv/bin/pip install --quiet --index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' "$pins")"
fi
.venv/bin/pip install --quiet --constraint "$pins" --editable '.[train]'
cp "$pins" .venv/pins.txt
