"""What a step costs by arithmetic: matmuls, FLOPs and MFU of a case, models by name, and what devices can do."""
