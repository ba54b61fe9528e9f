"""What a run of a case must contain: matmuls, casts, traffic, saved memory, fusions, relations. No torch in here."""
