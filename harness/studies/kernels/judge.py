"""Judges the observation of a kernel check: do both kernels run, or refuse for one reason, and are the values right?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from harness.studies.kernels.bound import Accumulator, allowed_of_sum, is_exact
from harness.trace.device import KernelCheck, KernelObservation
from harness.trace.record import Record

ProblemKind = Literal["refused", "ran", "message", "shape", "nonfinite", "bits", "error", "lost"]

# What a refusal is about, by words of torch's messages: those of its CUDA kernel and those of its meta registration.
REASONS = {
    "alignment": r"divisible by 16",
    "layout": r"row_major|col_major|row-major and column-major",
    "bias": r"\bBias\b",
    "operand dtypes": r"two Float8_e5m2 matrices",
    "output dtype": r"output types? (?:is|are) supported for row-wise|only supports BFloat16 output",
    "scales": r"scaling configuration|must be float \(fp32\)|contiguous for rowwise|scale_[ab] (?:must|stride)",
}


class Problem(Record, frozen=True, kw_only=True):
    """What is wrong with a kernel, as one check shows it."""

    kind: ProblemKind
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.kind}: expected {self.expected}, found {self.found}"


class KernelConclusion(Record, frozen=True, kw_only=True):
    """The result of a check. `allowed` is what `error_of_sum` may be; 0 where bits must be equal, and of refusals."""

    check: KernelCheck
    problems: tuple[Problem, ...]
    error_of_sum: float = 0.0
    allowed: float = 0.0

    @property
    def good(self) -> bool:
        """True if the kernel does what the exact one does."""
        return not self.problems


def reason_of(message: str) -> str:
    """What a refusal is about; "unknown" for words that no reason has."""
    return next((name for name, words in REASONS.items() if re.search(words, message)), "unknown")


def conclude(check: KernelCheck, seen: KernelObservation, accumulator: Accumulator) -> KernelConclusion:
    """Judge the observation of one check."""
    if seen.raised or seen.refusal:
        return KernelConclusion(check=check, problems=tuple(_refusal_problems(seen)))
    allowed = 0.0 if is_exact(check) else allowed_of_sum(check, accumulator)
    found = tuple(_value_problems(check, seen, allowed))
    return KernelConclusion(check=check, problems=found, error_of_sum=seen.error_of_sum, allowed=allowed)


def conclude_lost(check: KernelCheck, message: str) -> KernelConclusion:
    """The conclusion on a check that brought its rank down."""
    return KernelConclusion(check=check, problems=(Problem(kind="lost", expected="a result", found=message),))


def _refusal_problems(seen: KernelObservation) -> Iterator[Problem]:
    if not seen.raised:
        yield Problem(kind="ran", expected=f"a refusal: {seen.refusal}", found="a result")
    elif not seen.refusal:
        yield Problem(kind="refused", expected="a result", found=seen.raised)
    elif reason_of(seen.raised) != reason_of(seen.refusal) or reason_of(seen.raised) == "unknown":
        yield Problem(kind="message", expected=f"{reason_of(seen.refusal)}: {seen.refusal}", found=seen.raised)


def _value_problems(check: KernelCheck, seen: KernelObservation, allowed: float) -> Iterator[Problem]:
    if (seen.shape, seen.dtype) != (seen.expected_shape, seen.expected_dtype):
        expected, found = f"{list(seen.expected_shape)} {seen.expected_dtype}", f"{list(seen.shape)} {seen.dtype}"
        yield Problem(kind="shape", expected=expected, found=found)
    if seen.nonfinite:
        found = f"{seen.nonfinite} elements where they are not: {seen.example}"
        yield Problem(kind="nonfinite", expected="NaN and infinities where the exact result has them", found=found)
    if is_exact(check) and seen.unequal:
        found = f"{seen.unequal} others: {seen.example}"
        yield Problem(kind="bits", expected="the bits of the exact result", found=found)
    elif not is_exact(check) and not seen.error_of_sum <= allowed:
        found = f"{seen.error_of_sum:.3g}: {seen.example}"
        yield Problem(kind="error", expected=f"at most {allowed:.3g} of the sum of |a| |b|", found=found)
