#!/usr/bin/env bash
# Runs a command and turns its exit codes 1 (cases failed) and 5 (changed) into 0, because the gate judges these failures later.
set -uo pipefail
"$@"
code=$?
if [ "$code" -eq 1 ] || [ "$code" -eq 5 ]; then exit 0; fi
exit "$code"
