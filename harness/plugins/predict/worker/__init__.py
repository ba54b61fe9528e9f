"""A rank of a large layout in one process: real parallel and float8 code on fake tensors and a fake process group."""
