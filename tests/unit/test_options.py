"""The options of commands, and what they are given."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path

import click
import msgspec
import pytest
from click.shell_completion import ShellComplete
from hypothesis import given
from hypothesis import strategies as st

from harness.cli.explain import options_markdown
from harness.cli.main import app, main
from harness.cli.options import plan_parameter
from harness.errors import HarnessError
from harness.jsonform import from_json, to_json
from harness.matrix.case import Case, Float8, Layout, Train
from harness.matrix.casefile import parse_case_file
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.space import spaces_of
from harness.matrix.tier import count_cells
from harness.project import Project, find_project, is_case_file
from harness.request import default_arithmetic
from harness.run_options import PARTS, PlanOptions, RunOptions, option_named, options_of, words_of
from harness.running.plan import Plan, make_plan, parse_injection
from harness.running.selection import Query, excluded_cells, parse_keyword, select_cases
from harness.studies.noise import environment, measured_cases, over_seeds, recorded_cases, shares_its_parity_key
from harness.workflow import check_fits
from tests.builders import make_case, make_known
from tests.commands import understood
from tests.jobs import make_capacity
from tests.nvidia import put_nvidia_smi

ROOT = Path(__file__).parents[2]
VALUES: dict[str, object] = {
    "address": "node-0:6379",
    "timeout_s": 2.5,
    "timeout_factor": 3.0,
    "inject": ("a.py:f", "b.py:g"),
}


def test_every_option_of_run_is_listed_with_its_name_in_pytest_and_its_help() -> None:
    page = options_markdown()
    for part in PARTS:
        for option in options_of(part).values():
            assert f"`{option.flag.split('/')[0]}" in page and option.help in page


@pytest.mark.parametrize(
    "words",
    [
        "run",
        pytest.param("baseline update", marks=pytest.mark.plugin("baseline")),
        pytest.param("dev mutate", marks=pytest.mark.plugin("faults")),
        pytest.param("predict measure", marks=pytest.mark.plugin("predict")),
    ],
)
def test_every_command_that_runs_cases_has_the_options_of_how(words: str) -> None:
    command = understood(f"fp8-harness {words}").command
    has = {parameter.name for parameter in command.params}
    assert {name for name, option in options_of(PlanOptions).items() if not option.of_run} <= has


def test_the_default_of_an_option_is_that_of_a_plan() -> None:
    for name, option in options_of(PlanOptions).items():
        if name in Plan.__struct_fields__ and "auto" not in (*option.choices, *(option.metavar or "").split("|")):
            assert option.default in (None, getattr(Plan(), name)), name
    assert make_plan(device="cpu") == make_plan(device="cpu", backend="auto", launcher="fork")


def a_value(name: str) -> object:
    option = option_named(name)
    return option.choices[-1] if option.choices else VALUES[name]


def test_every_option_that_is_repeated_is_stored_and_has_its_words() -> None:
    given = {name: a_value(name) for name in RunOptions.__struct_fields__}
    options = from_json(to_json(RunOptions(**given)), RunOptions)
    assert options.as_given == given
    assert {option.flag for option in options_of(RunOptions).values()} == {
        word for word in options.words if word.startswith("--")
    }
    assert options.words == words_of(given)


def test_every_option_that_is_repeated_is_in_the_command_of_a_case() -> None:
    plain = set(Plan().command("x").split())
    for name, kind in options_of(RunOptions).items():
        if name in Plan.__struct_fields__:
            others = (choice for choice in kind.choices if choice not in ("auto", getattr(Plan(), name)))
            other = next(others, VALUES.get(name))
            words = Plan(**{name: other}).command("x").split()
            assert {kind.flag, *words_of({name: other})} <= set(words) - plain, name


def test_the_time_limit_of_a_case_is_multiplied() -> None:
    plain, slow = make_plan(device="cpu"), make_plan(device="cpu", timeout_factor=2.5)
    assert slow.deadline_s(Case()) == 2.5 * plain.deadline_s(Case())
    assert make_plan(device="cpu", timeout_s=9.0, timeout_factor=1.0).deadline_s(Case()) == 9
    with pytest.raises(HarnessError, match=r"--timeout-factor: contradicts --timeout-s. Fix: give one of them"):
        make_plan(device="cpu", timeout_s=9.0, timeout_factor=2.0)


def test_a_rerun_repeats_no_time_limit_beside_a_factor_given_anew() -> None:
    stored = RunOptions(device="cpu", timeout_s=9.0)
    assert stored.besides(RunOptions(timeout_factor=2.0)) == RunOptions(device="cpu")
    assert RunOptions(timeout_factor=2.0).besides(RunOptions(timeout_s=9.0)) == RunOptions()


GRID = """
[[matrix]]
name = "grid"
[matrix.axes]
tp = [1, 2, 3]
recipe = ["bf16", "rowwise", "tensorwise"]
all_gather = [{fp8_all_gather = false}, {fp8_all_gather = true}]
"""


def test_nearest_root_above(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    monkeypatch.setenv("FP8_HARNESS_STATE", str(tmp_path / "state"))
    assert find_project() == Project(root=project.root.resolve(), state=project.state.resolve())
    with pytest.raises(HarnessError, match="not a project root"):
        find_project(below)


def test_tiers_leave_out_records(project: Project, tmp_path: Path) -> None:
    for name in ("pr", "smoke", "known", "required"):
        (project.cases / f"{name}.toml").write_text("")
    assert project.own_tiers == ("pr", "smoke")
    assert set(project.own_tiers) < set(project.tiers) and not {"known", "required"} & set(project.tiers)
    assert is_case_file(project.cases / "pr.toml")
    assert not is_case_file(project.cases / "known.toml")
    assert not is_case_file(tmp_path / "pr.toml")


@pytest.mark.parametrize("text", ["", "x", "x.py", "x.py:", ":f", "x.py:1f", "x.txt:f"])
def test_injection_form(text: str) -> None:
    with pytest.raises(HarnessError, match=r"FILE\.py:FUNCTION"):
        parse_injection(text)


@given(st.binary(max_size=40))
def test_injection_reads_any_file(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.mktemp("inject") / "patch.py"
    file.write_bytes(content)
    with contextlib.suppress(HarnessError):
        parse_injection(f"{file}:apply")


def test_injection_is_absolute_and_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "patch.py").write_text("raise SystemExit\ndef apply():\n    pass\n")
    monkeypatch.chdir(tmp_path)
    injection = parse_injection("patch.py:apply")
    assert injection.target == f"{tmp_path.resolve()}/patch.py:apply"


def test_deadline_grows_with_the_case() -> None:
    small, large = Case(), Case(layout=Layout(tp=8), train=Train(steps=100))
    plan = Plan()
    assert plan.deadline_s(small) < plan.deadline_s(large)
    own = parse_case_id("tp2-tensorwise-dim.512-layers.4-ffn.1408-v4096-s50-b16")
    assert plan.deadline_s(own) > 900  # a busy machine needed 220
    assert Plan(timeout_s=3.0).deadline_s(large) == 3.0
    compiled = [msgspec.structs.replace(large, compile=mode) for mode in ("none", "graph", "inductor")]
    assert plan.deadline_s(compiled[0]) < plan.deadline_s(compiled[1]) < plan.deadline_s(compiled[2])


@pytest.mark.plugin("launchers")
def test_command_reproduces_the_way_it_was_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my patch.py").write_text("def apply(): ...\n")
    monkeypatch.chdir(tmp_path)
    plan = make_plan(device="cpu", backend="gloo", launcher="torchrun", inject=("my patch.py:apply",))
    words = "--backend gloo --launcher torchrun --inject 'my patch.py:apply'"
    assert plan.command("x") == f"fp8-harness run x {words}"


def test_ranks_of_a_program_of_ones_own_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(layout=Layout(tp=2))
    assert make_plan(device="cpu").one_node(case)
    monkeypatch.setenv("FP8_HARNESS_PROGRAM", "tests.acceptance.fake_program")
    plan = make_plan(device="cpu")
    assert not plan.one_node(case)
    assert plan.command("x") == "FP8_HARNESS_PROGRAM=tests.acceptance.fake_program fp8-harness run x"


@pytest.mark.parametrize(
    ("plan", "command"),
    [
        (Plan(device="cpu", arithmetic="exact"), "fp8-harness run x"),
        (Plan(device="cpu", arithmetic="kernel"), "fp8-harness run x --arithmetic kernel"),
        (Plan(device="cuda", backend="nccl", arithmetic="kernel"), "fp8-harness run x --device cuda"),
        (
            Plan(device="cuda", backend="nccl", arithmetic="exact"),
            "fp8-harness run x --device cuda --arithmetic exact",
        ),
        (Plan(timeout_s=20.0), "fp8-harness run x --timeout-s 20"),
        (Plan(timeout_s=0.1), "fp8-harness run x --timeout-s 0.1"),
        (Plan(timeout_factor=2.5), "fp8-harness run x --timeout-factor 2.5"),
        (Plan(program="my ranks"), "FP8_HARNESS_PROGRAM='my ranks' fp8-harness run x"),
    ],
)
def test_a_command_has_what_is_not_as_usual(plan: Plan, command: str) -> None:
    assert plan.command("x") == command
    assert make_plan(device="cpu").arithmetic == "exact" and default_arithmetic("cuda") == "kernel"


def test_a_gpu_is_not_asked_for_what_no_kernel_does() -> None:
    capacity, in_float64 = make_capacity(8), parse_case_id("tp2-tensorwise-v2048-f64")
    others = [parse_case_id(name) for name in ("tp2-tensorwise-v2048-b16", "single-bf16-v2048-f64")]
    with pytest.raises(HarnessError, match=r"1 of 3 cases cannot run .* float8 into float64.*--arithmetic exact"):
        check_fits([in_float64, *others], Plan(device="cuda", arithmetic="kernel", capacity=capacity))
    check_fits(others, Plan(device="cuda", arithmetic="kernel", capacity=capacity))
    check_fits([in_float64], Plan(device="cuda", arithmetic="exact", capacity=capacity))
    check_fits([in_float64], Plan(device="cpu", arithmetic="kernel", capacity=capacity))


def test_cuda_asked_for_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(HarnessError, match="no CUDA device"):
        make_plan(device="cuda")
    assert make_plan(device="auto").device == "cpu"


@pytest.fixture
def _one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", put_nvidia_smi(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


@pytest.mark.usefixtures("_one_gpu")
def test_fabrics_of_another_device_are_refused() -> None:
    with pytest.raises(HarnessError) as raised:
        make_plan(device="cpu", backend="nccl")
    assert raised.value.where == "--backend nccl" and "needs a GPU" in raised.value.what
    assert raised.value.fix == "use --backend shared or gloo, or --device cuda."
    assert make_plan(device="cuda").backend == make_plan(device="cuda", backend="nccl").backend == "nccl"
    assert make_plan(device="cpu").backend == "shared"
    for asked in ("shared", "gloo"):
        assert make_plan(device="cpu", backend=asked).backend == asked
        with pytest.raises(HarnessError, match=f"--backend {asked}: ranks on cuda cannot use it"):
            make_plan(device="cuda", backend=asked)


@pytest.mark.usefixtures("_one_gpu")
def test_ranks_record_the_same_on_every_device() -> None:
    for text in ("tp2-tensorwise-v2048-b16", "fsdp2-rowwise-graph-v2048-b16"):
        case = parse_case_id(text)
        asked = {*make_plan(device="cpu").records_of(case)}
        assert {*make_plan(device="cuda").records_of(case)} == asked and asked > {"sketches", "traffic", "flops"}


def test_nothing_is_asked_for_that_no_run_of_the_case_can_record() -> None:
    plan = make_plan(device="cpu")
    eager, compiled = (plan.records_of(parse_case_id(f"tp2-tensorwise{way}-v2048-b16")) for way in ("", "-graph"))
    assert {*eager} - {*compiled} == {"operands", "module_tensors"} and {*compiled} - {*eager} == {"graphs"}
    assert "module_tensors" not in plan.records_of(parse_case_id("hsdp2x2-tensorwise-v2048-f64"))


def test_a_case_is_selected_once(project: Project) -> None:
    (project.cases / "a.toml").write_text('[[case]]\naxes = {recipe = "rowwise"}\n')
    name = case_id(Case(float8=Float8(recipe="rowwise")))
    assert len(select_cases(project, Query(sources=("a", name, "a")))) == 1


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("rowwise", {"tp2-rowwise", "tp4-rowwise"}),
        ("ROWWISE and not tp4", {"tp2-rowwise"}),
        ("not (rowwise or tp4)", {"single-bf16"}),
        ("-bf16", {"single-bf16"}),
    ],
)
def test_k_keeps_ids_as_pytest_does(text: str, kept: set[str]) -> None:
    assert set(filter(parse_keyword(text), ("tp2-rowwise", "tp4-rowwise", "single-bf16"))) == kept


@pytest.mark.parametrize("text", ["", "rowwise and", "a b", "(a", "not"])
def test_k_refuses_what_is_no_expression(text: str) -> None:
    with pytest.raises(HarnessError, match=r"join parts of ids by and, or, not"):
        parse_keyword(text)


def test_another_word_in_place_of_a_tier_is_told_the_tiers(project: Project) -> None:
    (project.cases / "smoke.toml").write_text("")
    with pytest.raises(HarnessError, match=r"a case id or a .toml file\. Fix: did you mean smoke"):
        select_cases(project, Query(sources=("smok",)))


def test_a_file_decides_which_project_it_is_of_where_no_other_is_here(
    project: Project, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project.root / "golden").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path_factory.mktemp("away"))
    file = str(project.cases / "mine.toml")
    assert find_project(files=(file,)).root == project.root
    elsewhere = find_project(files=("mine",))
    assert elsewhere.root == ROOT and elsewhere.is_shipped and not project.is_shipped
    with pytest.raises(HarnessError, match="no project is here or above"):
        elsewhere.check_writable()


def test_cells_that_rules_exclude_are_told(project: Project) -> None:
    axes = "[matrix.axes]\nlayout = [{}, {tp = 2}]\n"
    (project.cases / "mine.toml").write_text(f'[[matrix]]\nname = "m"\nbase = {{heads = 1, kv_heads = 1}}\n{axes}')
    assert excluded_cells(project, Query(sources=("mine",))) == "1 cell excluded: heads_divide_tp"
    assert excluded_cells(project, Query(sources=("tp2-bf16-v2048-f32",))) == ""


def test_an_excluded_id_names_its_rule(project: Project) -> None:
    case = Case(layout=Layout(dp_shard=3), train=Train(global_batch=8))
    with pytest.raises(HarnessError, match="batch_divides_dp"):
        select_cases(project, Query(sources=(case_id(case),)))


@pytest.mark.parametrize(
    ("name", "values"),
    [("tp", [1, 2, 3]), ("recipe", ["bf16", "rowwise", "tensorwise"]), ("fp8_all_gather", [False, True])],
)
def test_census_parts_add_up(name: str, values: list[object]) -> None:
    """Cells and rule counts of all values of an axis add up to those of the whole matrix."""
    file = parse_case_file(GRID, where="grid.toml")
    whole = count_cells(file, {})
    parts = [count_cells(file, {name: value}) for value in values]
    assert whole.cells == math.prod(spaces_of(file.blocks, None)[0].sizes)
    assert sum(part.cells for part in parts) == whole.cells
    for count in whole.counts:
        cells = [
            part_count.cells for part in parts for part_count in part.counts if part_count.rule.name == count.rule.name
        ]
        assert sum(cells) == count.cells
    assert count_cells(file, {"dtype": "bfloat16"}).cells == 0, "the matrix does not have this value"


ON_RANKS = [make_case(recipe="rowwise", dp_shard=size) for size in (1, 2, 4, 8)]
REFUSED = make_case(recipe="rowwise", tp=2, output_layer=True, vocab_size=2256)


def test_measured_cases_spread_over_layouts_and_leave_out_refusals() -> None:
    chosen = measured_cases([*ON_RANKS, REFUSED], layouts=3)
    assert [case.world_size for case in chosen] == [1, 4, 8]
    assert [case.train.seed for case in over_seeds(chosen, 2)] == [0, 0, 0, 1, 1, 1]


def test_measured_cases_leave_out_those_with_a_recorded_fault_and_name_it() -> None:
    fault = make_known(name="lost-rows", where="dp_shard=4,8")
    chosen = measured_cases(ON_RANKS, layouts=4, known=[fault])
    assert [case.world_size for case in chosen] == [1, 2]
    left_out = recorded_cases(ON_RANKS, [fault])
    assert left_out == {case_id(case): (fault,) for case in ON_RANKS[2:]}
    assert recorded_cases([REFUSED], [make_known(where="tp=2")]) == {}, "it is not measured anyway"


def test_environment_names_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert environment() == "default"
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert environment() == "ATEN_CPU_CAPABILITY=avx2"


@pytest.mark.parametrize(
    ("case", "shared"),
    [
        ("tp2-tensorwise-v2048-f64", False),  # the model that the key was measured with
        ("tp2-tensorwise-dim.512-v2048-f64", True),
        ("fsdp2-tensorwise-debug-v2048-b16", True),
        ("tp2-tensorwise-dim.512-v2048-b16", False),  # its key names the model
    ],
)
def test_a_model_of_ones_own_is_measured_under_keys_of_its_own_alone(case: str, shared: bool) -> None:
    assert shares_its_parity_key(parse_case_id(case)) is shared


def plan_of(*words: str) -> Plan:
    """The plan that a command other than `run` makes of these words."""
    made: list[Plan] = []

    @click.command()
    @plan_parameter
    def command(*, plan_for: Callable[..., Plan]) -> None:
        made.append(plan_for())

    command.main([*words, "--device", "cpu"], standalone_mode=False)
    return made[0]


def test_other_commands_have_rare_options_by_o() -> None:
    plan = plan_of("-o", "backend=gloo", "-o", "timeout-s=3", "-o", "slots=12")
    assert (plan.backend, plan.timeout_s, plan.capacity.total) == ("gloo", 3.0, 12)
    assert plan_of().backend == "shared"


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("bakcend=gloo", "-o bakcend=gloo: unknown option 'bakcend'. Fix: did you mean backend?"),
        (
            "backend=glo",
            "-o backend=glo: 'glo' is not one of 'auto', 'shared', 'gloo', 'nccl'. Fix: see `--backend` of",
        ),
        ("slots", "-o slots: slots has no value. Fix: write -o slots=VALUE."),
        ("inject=fix.py:apply", "unknown option 'inject'."),
    ],
)
def test_a_rare_option_that_is_none_is_explained(word: str, text: str) -> None:
    with pytest.raises(HarnessError) as raised:
        plan_of("-o", word)
    assert text in str(raised.value)


def completed(*words: str) -> list[str]:
    *before, last = words
    completions = ShellComplete(app, {}, "fp8-harness", "").get_completions(before, last)
    return [item.value for item in completions if item.type == "plain"]


@pytest.mark.plugin("parity", "predict")
def test_names_and_values_of_axes_are_completed() -> None:
    assert completed("new", "--set", "check") == ["checkpointing=", "checkpoint_every="]
    assert completed("predict", "cost", "--set", "async") == ["async_tp=true", "async_tp=false"]
    assert completed("run", "--set", "recipe=row") == ["recipe=rowwise", "recipe=rowwise_with_gw_hp"]
    assert completed("parity", "--set", "lr=") == ["lr=0.001"]
    assert completed("run", "--set", "nothing") == []


@pytest.mark.plugin("bugs", "faults", "parity")
def test_tiers_cases_rules_faults_and_files_are_completed() -> None:
    assert completed("run", "smo") == ["smoke"] and "nightly" in completed("list", "")
    assert "fsdp2-tensorwise-ag.fp8-v2048-s2-f64" in completed("run", "fsdp2-tensorwise-ag")
    assert (
        completed("explain", "scales/am")
        == ["scales/amax", "scales/amax-sources"][: len(completed("explain", "scales/am"))]
    )
    assert completed("run", "--inject", "fault:amax_not_reduced") and completed("bug", "repro", "ao-193") == ["ao-1938"]
    assert completed("run", "--target", "ref") == ["reference"] and completed("parity", "-o", "backe") == ["backend="]
    for words in (["run", "x"], ["run", "--inject", "fix"]):
        kinds = [item.type for item in ShellComplete(app, {}, "fp8-harness", "").get_completions(words[:-1], words[-1])]
        assert kinds[0] == "file", "a shell drops what comes before a file"


def test_a_run_of_axes_has_no_other_selection(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "smoke", "--set", "tp=2"]) == 2
    assert "--set tp=2: smoke says which cases. Fix: leave one of them out" in capsys.readouterr().err


def test_what_is_said_before_a_command_is_for_it(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    (project.cases / "mine.toml").write_text('[[case]]\naxes = {recipe = "rowwise"}\n')
    assert main(["--root", str(project.root), "list", "mine"]) == 0
    assert capsys.readouterr().out == "  1  single-rowwise-v2048-f32\n"
    assert main(["list", "mine"]) == 2


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("new --id --no-loss-parallel", "--set loss_parallel=false: loss_parallel (true, false)."),
        pytest.param(
            "parity --output-layer",
            "--set output_layer=true: output_layer (true, false).",
            marks=pytest.mark.plugin("parity"),
        ),
        pytest.param("dev mutate --backend gloo", "-o backend=VALUE.", marks=pytest.mark.plugin("faults")),
        pytest.param("bug check -j 4", "-o jobs=VALUE.", marks=pytest.mark.plugin("bugs")),
        ("list pr --root x", "it before the command: fp8-harness --root DIR list."),
        pytest.param(
            "bug check -q", "it before the command: fp8-harness -q bug check.", marks=pytest.mark.plugin("bugs")
        ),
    ],
)
def test_an_option_that_has_become_a_value_says_how_to_give_it(
    capsys: pytest.CaptureFixture[str], words: str, fix: str
) -> None:
    assert main(words.split()) == 2
    assert f"Fix: give {fix}" in capsys.readouterr().err
    assert main(["list", "--lr", "1"]) == 2
    assert "--set" not in capsys.readouterr().err, "that command has none"
