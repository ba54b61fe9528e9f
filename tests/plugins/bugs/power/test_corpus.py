"""The corpus of reported bugs: a handful is proved in every run, all of it in the sweeps."""

import pytest

from harness.plugins.bugs.corpus import Corpus, check_corpus, provable_bugs
from harness.project import find_project
from harness.running.executor import Executor
from harness.running.plan import make_plan
from harness.running.progress import SilentProgress
from harness.verdict import ExitCode

# A refusal, a recorded bug, and one that is silent.
HANDFUL = ("torchtitan-461", "ao-1938", "te-534")


def checked(executor: Executor, *names: str) -> Corpus:
    project = find_project()
    return check_corpus(project, provable_bugs(project, names), make_plan(device="cpu"), SilentProgress(), executor)


def assert_proved(corpus: Corpus) -> None:
    assert {proof.bug: (*proof.mismatches, *proof.undecided) for proof in corpus.proofs if proof.mismatches} == {}
    assert corpus.exit_code == ExitCode.GOOD


def test_a_handful_of_bugs_is_as_their_files_say(executor: Executor) -> None:
    corpus = checked(executor, *HANDFUL)
    assert [proof.bug for proof in corpus.proofs] == list(HANDFUL)
    assert_proved(corpus)


@pytest.mark.sweep
def test_every_bug_is_as_its_file_says(executor: Executor) -> None:
    corpus = checked(executor)
    assert len(corpus.proofs) >= 45
    assert_proved(corpus)
