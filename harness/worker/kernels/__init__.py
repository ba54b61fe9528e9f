"""The float8 matmul of a device, compared with the exact one: a rank program of its own."""
