"""The ranks of the conformance study: run operators on DTensors, and report results and communication cost."""
