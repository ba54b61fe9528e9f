#!/usr/bin/env bash
# Prints what a nightly gate compares: `ci/nightly-versions.sh PACKAGE INDEX [GOOD]` writes the lines newest=VERSION and
# good=VERSION. GOOD is the last good version; without it, and where the index has dropped it, the installed one.
set -euo pipefail
package=$1
index=$2
good=${3:-}
installed=$(.venv/bin/python -c "from importlib.metadata import version; print(version('$package'))")
listed=$(.venv/bin/python -m pip index versions --pre --index-url "$index" "$package" |
  sed -n 's/^Available versions: //p' | tr -d ' ' | tr , '\n')
if [ -z "$listed" ]; then echo "$index lists no version of $package" >&2 && exit 1; fi
if ! grep --quiet --line-regexp --fixed-strings "$good" <<< "$listed"; then good=$installed; fi
echo "newest=$(head -n 1 <<< "$listed")"
echo "good=$good"
