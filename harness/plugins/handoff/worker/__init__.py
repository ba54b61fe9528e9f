"""Reads tensors of torch, in the process of a test and on ranks."""
