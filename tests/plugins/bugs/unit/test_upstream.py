"""Drafts for upstream: what they say of installed sources is so, and each names faults that are recorded."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.matrix.records import read_known
from harness.plugins.bugs.upstream import Record, read_records, record_named
from harness.project import Project, find_project
from tests.plugins.bugs.patched import installed_file

PROJECT = find_project()
RECORDS = read_records(PROJECT)
LINK = re.compile(r"https://github\.com/(\w+/\w+)/blob/([\w.]+)/([\w./]+?)(?:#L(\d+)(?:-L(\d+))?)?")
# Of these the tracker has the report, or nobody will file one; the reason is in the record or in its bug file.
NOT_DRAFTED = {
    "async-tp-rowwise-fuses-nothing-outside-bfloat16": "a fusion that is missing, not a wrong number",
    "async-tp-fuses-no-float8-matmul-with-a-bias": "a fusion that is missing, not a wrong number",
    "compiled-block-loses-gradient-of-async-input": "pytorch#191113 mends it",
    "compiled-block-crashes-on-async-input": "pytorch#191113 mends it",
    "torchtitan-async-tp-fuses-nothing": "needs torchtitan and torch 2.15",
    "inductor-casts-by-the-local-amax": "pytorch#185509, mended in torch 2.14; no small program shows it",
    "mxfp8-matmul-of-shards": "pytorch#191992",
    "mxfp8-floor-has-no-sharding-rule": "its operator exists on an SM 10.0 GPU only",
    "mxfp8-wrapper-inside-of-dtensor": "ao#4010 mends it",
    "mxfp8-wrapper-drops-the-bias": "ao#4846, ao#4847 mends it",
    "zero-bubble-adds-up-microbatches-in-bfloat16": "no small program shows it",
    "sgd-momentum-of-partial-gradients-is-not-saved": "torch 2.15 only",
}


def test_every_recorded_fault_has_a_draft_or_a_reason_for_none() -> None:
    known = {fault.name for fault in read_known(PROJECT.known)}
    drafted = list(chain.from_iterable(record.faults for record in RECORDS))
    assert sorted(known) == sorted([*drafted, *NOT_DRAFTED])


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_draft_is_short_and_says_nothing_of_this_project(record: Record) -> None:
    text = " ".join(
        (record.title, record.symptom, record.cause, record.affects, record.remedy, record.script.read_text())
    )
    assert len(record.script.read_text().splitlines()) <= 60 and len(record.title) <= 130
    assert sum(map(bool, record.symptom.strip().splitlines())) <= 14
    assert re.search(r"harness|&gt;|/work|look again", text) is None
    assert "expected" in record.output and "actual" in record.output


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_links_are_of_the_installed_release_and_name_what_the_patch_changes(record: Record) -> None:
    pytest.importorskip("torch")
    from torch.version import git_version

    commits = {"pytorch/pytorch": git_version, "pytorch/ao": "5f2baf9d575cf732362594c998c399902942531f"}  # v0.18.0
    paths = []
    for link in record.at:
        match = LINK.fullmatch(link)
        assert match is not None, link
        repository, commit, path, first, last = match.groups()
        assert commit == commits.get(repository, commit)
        paths.append(path)
        if first is not None and repository in commits:
            lines = installed_file(path).read_text().splitlines()[int(first) - 1 : int(last or first)]
            assert any(line.strip() for line in lines)
    changed = re.findall(r"^--- a/(\S+)", record.patch, flags=re.MULTILINE)
    assert set(changed) <= set(paths)


def test_a_record_is_found_by_its_name_and_by_the_fault_it_explains(tmp_path: Path) -> None:
    record = record_named(PROJECT, "async-tp-scatters-rows-by-batch")
    assert record is not None and record == record_named(PROJECT, "scaled_matmul_reduce_scatter")
    assert record_named(PROJECT, "ao-1938") is None
    (tmp_path / "cases" / "upstream").mkdir(parents=True)
    text = 'title = "a"\nsymptom = "b"\ncause = "c"\naffects = "d"\noutput = "e"\nat = []\n'
    (tmp_path / "cases" / "upstream" / "own.toml").write_text(text)
    with pytest.raises(HarnessError, match=r"own\.toml: it has neither a patch nor a remedy"):
        read_records(Project(root=tmp_path, state=tmp_path))
