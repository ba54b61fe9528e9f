"""Training of a case: weights and tokens in, a few steps under probes, a trace out."""
