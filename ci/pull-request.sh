#!/usr/bin/env bash
# Makes the environment, installs the project in whose folder this runs, and writes what `ci/pull_request.py` writes there.
# FP8_INSTALL is the project's install command; its torch is the CPU build, whichever version it pins.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
(cd "$root" && ci/environment.sh cpu)
source "$root/.venv/bin/activate"
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu bash -euo pipefail -c "${FP8_INSTALL:-}"
if compgen -G "$root/.venv/lib/python*/site-packages/nvidia*" > /dev/null; then
  echo "FP8_INSTALL installed CUDA wheels: gigabytes that a runner without a GPU does not need. Fix: install torch's CPU build." >&2
  exit 2
fi
echo "environment: $(du -sm "$root/.venv" | cut -f1) MB, $SECONDS s"
exec python "$root/ci/pull_request.py"
