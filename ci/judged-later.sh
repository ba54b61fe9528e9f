#!/usr/bin/env bash
# Runs a command of which 1 is an answer, that cases failed: the gate decides what that means.
set -uo pipefail
"$@"
code=$?
if [ "$code" -eq 1 ]; then exit 0; fi
exit "$code"
