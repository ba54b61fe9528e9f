"""Targets: the systems under test. `reference/` is a Llama on torch and torchao."""
