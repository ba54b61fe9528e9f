"""Conformance of DTensor's sharding strategies for the operators of the FP8 path: what is asked, what is right, verdicts.

No torch in here: ranks run the checks (`harness/worker/conformance`), this package says which and judges what came back.
"""
