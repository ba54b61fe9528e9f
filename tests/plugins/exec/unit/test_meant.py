"""What is meant: rules that no script promises, files and comments."""

import fnmatch
from pathlib import Path

import msgspec
import pytest

from harness.checks.catalogue import RULES
from harness.errors import HarnessError
from harness.matrix.case import Case, Float8, Layout
from harness.plugins.exec.expectations import Meant, differences, in_comments, read, written
from harness.plugins.exec.judge import checks_of_scripts, is_unmeant, judge_records, unmeant
from harness.plugins.exec.request import RECORDED, ProcessRecord
from tests.builders import make_trace as trace


def test_every_unmeant_rule_is_one_of_a_check_of_scripts() -> None:
    rules = {rule.name for check in checks_of_scripts() for rule in check.rules}
    assert [rule for rule in unmeant() if not fnmatch.filter(rules, rule)] == []
    assert "scales/amax" in RULES
    assert not is_unmeant("scales/amax")
    assert is_unmeant("model/dtype")
    assert not is_unmeant("model/dtype", ("model/dtype",))


def test_no_check_of_scripts_needs_another_run_and_what_they_read_is_recorded() -> None:
    names = {check.name for check in checks_of_scripts()}
    assert {"scales", "traffic", "finite", "updates"} <= names
    assert names.isdisjoint({"parity", "loss_vs_golden", "profile", "metamorphic", "module_replay", "underflow"})
    read = {record for check in checks_of_scripts() for record in (*check.records, *check.also_reads)}
    assert set(RECORDED) <= read
    assert read <= {*RECORDED, "experts", "graphs"}


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    meant = Meant(options={"tp": 2}, rules=("model/dtype",), casts={"layers.*.up: weight in forward to e4m3": 4})
    (file := tmp_path / "meant.toml").write_text(written(meant))
    assert read(file) == meant


def test_comments_of_a_script_are_lines_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "meant.toml").write_text(written(Meant(options={"tp": 2})))
    script = tmp_path / "train.py"
    script.write_text('x = 1\n# fp8-harness: expect meant.toml\n  # fp8-harness: reduce_dtype = "bfloat16"\n')
    assert in_comments(script) == Meant(options={"tp": 2, "reduce_dtype": "bfloat16"})
    script.write_text("x = 1  # fp8\n")
    assert in_comments(script) is None


@pytest.mark.parametrize(
    ("text", "says"), [("[casts", "Expected"), ("steps = 1", "steps"), ('[casts]\na = "b"', "int")]
)
def test_a_file_that_says_something_else_is_an_error(tmp_path: Path, text: str, says: str) -> None:
    (file := tmp_path / "meant.toml").write_text(text)
    with pytest.raises(HarnessError, match=says):
        read(file)


def test_an_option_that_is_otherwise_is_a_finding_and_one_that_is_not_there_an_error() -> None:
    case = Case(target="script", layout=Layout(dp_shard=2), float8=Float8(recipe="tensorwise"))
    (found,) = differences(Meant(options={"dp_shard": 4, "recipe": "tensorwise"}), case, [trace()])
    assert (found.rule, found.expected, found.found) == ("expected/option", "4", "2")
    with pytest.raises(HarnessError, match="no option 'shards'"):
        list(differences(Meant(options={"shards": 4}), case, [trace()]))


def test_ranks_that_build_something_else_are_a_finding() -> None:
    case = Case(target="script", layout=Layout(dp_shard=2))
    other = msgspec.structs.replace(case, float8=Float8(recipe="tensorwise"))
    records = [
        ProcessRecord(pid=rank, rank=rank, world_size=2, case=own, trace=trace(rank=rank))
        for rank, own in enumerate((case, other))
    ]
    first = judge_records(records).findings[0]
    assert (first.rule, first.values["name"], first.ranks) == ("watch/otherwise", "recipe", (1,))


def test_a_later_loss_that_is_no_number_is_a_finding() -> None:
    record = ProcessRecord(pid=1, rank=0, world_size=1, not_finite=(17, float("nan")))
    (found,) = judge_records([record]).findings
    assert (found.rule, found.step, found.rank) == ("watch/loss", 17, 0)
