"""What `bug check` prints: a line for every bug file, then what is not as the files say. As text or JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from harness.bugs.corpus import Corpus, Proof
from harness.plural import counted
from harness.report.sections import printable
from harness.report.wording import aligned

_COLUMNS = ("bug", "case", "clean", "with fault", "detected by")


def corpus_text(corpus: Corpus) -> str:
    """A table of the bugs; every mismatch and every run that says nothing; totals."""
    rows = [_COLUMNS, *(row for proof in corpus.proofs for row in _rows(proof))]
    parts = [
        aligned(rows),
        _listed("not as the bug file says", ((proof.bug, proof.mismatches) for proof in corpus.proofs)),
        _listed("not decided", ((proof.bug, proof.undecided) for proof in corpus.proofs)),
        _totals(corpus),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _rows(proof: Proof) -> Iterable[tuple[str, ...]]:
    """A line of the bug with its first planted fault, and one for each other fault."""
    faults = [f"{name}: {verdict.value}" for name, verdict in proof.planted.items()] or ["-"]
    clean = "not run" if proof.clean is None else proof.clean.value
    found = "MISMATCH" if proof.mismatches else ", ".join(proof.detected_by) or "-"
    yield proof.bug, proof.case_id, clean, faults[0], found
    yield from (("", "", "", fault, "") for fault in faults[1:])


def _listed(title: str, told: Iterable[tuple[str, tuple[str, ...]]]) -> str:
    lines = [f"  {bug}: {printable(text)}" for bug, texts in told for text in texts]
    return "\n".join([f"{title}:", *lines]) if lines else ""


def _totals(corpus: Corpus) -> str:
    counts = Counter(proof.status for proof in corpus.proofs)
    told = ", ".join(f"{counts[status]} {status}" for status in ("live", "fixed"))
    wrong = sum(bool(proof.mismatches) for proof in corpus.proofs)
    open_ = sum(bool(proof.undecided) for proof in corpus.proofs)
    ends = [f"{wrong} not as the file says"] * bool(wrong) + [f"{open_} not decided"] * bool(open_)
    says = ", ".join(ends) or "all as their files say"
    return f"{counted(len(corpus.proofs), 'bug')}: {told}; {says}; {corpus.wall_s:.0f} s"
