"""The reference target: a Llama parallelized with torch and torchao as users do it. Start with `build.py`."""
