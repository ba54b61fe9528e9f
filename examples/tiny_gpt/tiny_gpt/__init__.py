"""A small language model and its training loop. `python -m tiny_gpt` trains it on made-up text."""
