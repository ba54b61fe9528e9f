#!/usr/bin/env bash
# Runs a command and turns its exit code 1 (cases failed) into 0, because the gate judges these failures later.
set -uo pipefail
"$@"
code=$?
if [ "$code" -eq 1 ]; then exit 0; fi
exit "$code"
