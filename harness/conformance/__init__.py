"""Conformance of DTensor's sharding strategies for the operators of the FP8 path: what is asked and what is right.

No torch in here: ranks run the checks (`harness/worker/conformance`), this package says which and judges the answers.
"""
