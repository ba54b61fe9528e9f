"""Three rings of evidence that a GPU does what the harness says of it.

kernel: the float8 matmul of the device beside the exact one. proof: the exact matmul with the real collectives,
sharding and compiler. native: the real kernels in bfloat16, whose losses become goldens.
"""
