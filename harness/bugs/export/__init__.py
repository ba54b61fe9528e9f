"""A case that fails as one Python file that needs torch and torchao only, and a draft of an issue about it."""
