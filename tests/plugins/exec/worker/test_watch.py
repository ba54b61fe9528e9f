"""A plain script on ranks of the virtual device: no finding in clean ones, a headline for injected faults."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from harness.headline import headline_of
from harness.plugins.exec.expectations import meant_by, read, written
from harness.plugins.exec.judge import Judged, compare, judge_records
from harness.plugins.exec.request import RECORDS, ProcessRecord

HERE = Path(__file__).parents[1]
# By name: ranks, options of the script, and the fault.
CLEAN = {
    "fsdp": "2|LAYOUT=fsdp",
    "tp": "2|LAYOUT=tp RECIPE=rowwise EVALUATE=1",
    "mixed": "4|LAYOUT=fsdptp",
    "replicas": "2|LAYOUT=ddp",
    "gathered": "4|LAYOUT=hsdp GATHER=1 CHECKPOINT=1",
    "reduced": "2|LAYOUT=fsdp REDUCE=bfloat16",
    "lost": "2|LAYOUT=fsdp LOST=1",
}
# The headline of each begins with a rule and a module, and names an operand and a step where the fault has them.
FAULTS = {
    "amax_not_reduced_over_tp": ("2|LAYOUT=tp", "scales/amax in layers.0.up: ", "weight in forward at step 1"),
    "scale_margin": ("2|LAYOUT=fsdp", "scales/amax in layers.0.up: ", "input in forward at step 1"),
    "precomputed_scale_one_step_late": ("2|LAYOUT=fsdp GATHER=1", "lifetime/scale in layers.0.up: ", "at step 3"),
    "update_missing_on_one_rank": ("2|LAYOUT=fsdp", "updates/unmoved in embedding.weight: ", "on rank 1"),
    "one_rank_leaves_a_linear_out": ("2|LAYOUT=fsdp", "fp8_on/not-converted in layers.0.down: ", "on rank 1"),
}

Recorded = Callable[[str], list[ProcessRecord]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("jobs")
    jobs = [f"{name}|{job}" for name, job in CLEAN.items()]
    jobs += [f"{name}|{job}|fault:{name}" for name, (job, _, _) in FAULTS.items()]
    subprocess.run(
        [sys.executable, HERE / "ranks.py", folder, HERE / "plain.py", *jobs], check=True, capture_output=True
    )

    def records(name: str) -> list[ProcessRecord]:
        files = sorted((folder / name).glob(RECORDS))
        return [msgspec.msgpack.decode(file.read_bytes(), type=ProcessRecord) for file in files]

    return records


def _rules(judged: Judged) -> list[str]:
    return [finding.rule for finding in judged.findings]


@pytest.mark.parametrize("name", [name for name in CLEAN if name != "lost"])
def test_a_clean_script_has_no_finding(recorded: Recorded, name: str) -> None:
    judged = judge_records(recorded(name))
    assert not judged.findings
    assert {"scales", "matmuls", "traffic", "updates", "finite", "lifetime"} <= set(judged.checks)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_has_the_headline_of_a_case(recorded: Recorded, name: str) -> None:
    _, begin, part = FAULTS[name]
    what = headline_of(judge_records(recorded(name)).findings, command="", ranks=2).what
    assert what.startswith(begin)
    assert part in what


def test_the_case_is_what_the_script_has_built(recorded: Recorded) -> None:
    mixed, gathered = (recorded(name)[0] for name in ("mixed", "gathered"))
    assert mixed.case is not None
    assert gathered.case is not None
    assert (mixed.case.layout.dp_shard, mixed.case.layout.tp, mixed.case.float8.recipe) == (2, 2, "tensorwise")
    assert (gathered.case.layout.dp_replicate, gathered.case.layout.dp_shard) == (2, 2)
    assert gathered.case.float8.fp8_all_gather
    assert gathered.case.checkpointing.mode == "full"
    assert (gathered.case.train.dtype, gathered.case.train.accumulation, gathered.steps) == ("bfloat16", 2, 5)


def test_an_optimizer_without_the_parameters_of_the_model_is_a_finding(recorded: Recorded) -> None:
    assert _rules(judge_records(recorded("lost"))) == ["watch/not-in-model"]


def test_what_a_run_does_is_what_is_meant(recorded: Recorded, tmp_path: Path) -> None:
    fsdp, reduced = recorded("fsdp"), recorded("reduced")
    first = fsdp[0]
    assert first.case is not None
    assert first.trace is not None
    (file := tmp_path / "meant.toml").write_text(written(meant_by(first.case, [first.trace])))
    meant = read(file)
    assert not judge_records(fsdp, meant).findings
    found = judge_records(reduced, meant).findings
    assert [finding.rule for finding in found] == ["expected/option", "expected/collectives"]
    assert (found[0].values["name"], found[0].expected, found[0].found) == ("reduce_dtype", "float32", "bfloat16")
    assert _rules(judge_records(recorded("scale_margin"), meant))[0] == "scales/amax"


def test_records_of_two_runs_are_compared(recorded: Recorded) -> None:
    first, again, other = recorded("fsdp")[0], recorded("fsdp")[0], recorded("scale_margin")[0]
    assert compare(first, again) == ()
    (number,) = compare(first, other)
    assert (number.rule, number.step) == ("watch/number", 1)
