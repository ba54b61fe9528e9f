"""Studies: many runs that answer one question: noise, references, power, conformance."""
