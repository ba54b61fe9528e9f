"""Which device every case gets on machines that this one is not: by its needs, its ranks and the build of torch."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from harness.cli.main import app
from harness.engine.hardware import Device, NodeCapacity, driver_version, installed_gpus, read_each_other
from harness.errors import HarnessError
from harness.evidence.verified import provable_levels
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id, parse_layout
from harness.matrix.rules import GpuFacts, gpu_needs, unmet_needs
from harness.plugins.gpu.levels import without_obstacles
from harness.plugins.parity.against import Against
from harness.project import find_project
from harness.report.run import devices_line
from harness.request import Arithmetic
from harness.run_options import PlanOptions, options_of
from harness.running.identity import environment, witness_key
from harness.running.machine import TorchBuild, torch_build, unusable
from harness.running.plan import Plan, plan_without_ranks
from harness.running.selection import Query, select_cases
from harness.studies.records import needed_references
from harness.workflow import check_fits
from tests.builders import make_case, make_result
from tests.commands import understood
from tests.jobs import make_capacity
from tests.nvidia import B200, CUDA_12, H100, MACHINES, Machine

REPOSITORY = Path(__file__).parents[2]
Pretend = Callable[[str | Machine], None]


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pretend:
    def become(machine: str | Machine) -> None:
        folder = tmp_path / "machine"
        folder.mkdir()
        (machine if isinstance(machine, Machine) else MACHINES[machine]).pretend(folder, monkeypatch)

    return become


def planned(**options: object) -> Plan:
    return plan_without_ranks(PlanOptions(**options))


def end_line(cases: Sequence[Case], plan: Plan) -> str:
    """The line about devices at the end of a run of these cases; fails where they cannot be run."""
    check_fits(cases, plan)
    results = [make_result(place=own.place(cases[at])) for own, positions in plan.parts(cases) for at in positions]
    return devices_line(results)


def tier(name: str) -> tuple[Case, ...]:
    return select_cases(find_project(), Query(sources=(name,)))


# Machines


NO_CUDA = "torch 2.13.0+cpu was built without CUDA, so 8 x NVIDIA H100 80GB HBM3 cannot be used"
OLD = "the driver is 535.104.05, and CUDA 13.0 of torch 2.13.0+cu130 needs 580 or newer, so 8 x NVIDIA H100 80GB HBM3 "
AMD = "torch 2.13.0+rocm7.1 is for ROCm 7.1.25424, and AMD GPUs, with their float8_e4m3fnuz, are not supported"
KINDS = (
    "there are different GPUs side by side: NVIDIA H100 80GB HBM3 (0, 1); NVIDIA L40S (2); choose one kind, such as "
)
SMOKE = {
    "none": "",
    "none, torch for CUDA": "",
    "laptop": "1 on 1 x NVIDIA GeForce RTX 3050 Laptop GPU, with the exact matmul; 7 on the CPU: "
    "fewer GPUs than ranks (6), float8 matmuls need compute capability 8.9 (1)",
    "1 x H100": f"1 on 1 x {H100}, with the exact matmul; 7 on the CPU: fewer GPUs than ranks",
    "8 x H100": f"8 on 8 x {H100}, 6 of them with the exact matmul",
    "2 x 4090": "5 on 2 x NVIDIA GeForce RTX 4090, with the exact matmul; 3 on the CPU: fewer GPUs than ranks",
    "8 x B200": f"8 on 8 x {B200}, 6 of them with the exact matmul",
    "MIG": f"1 on 1 x {H100} MIG 3g.40gb, with the exact matmul; 7 on the CPU: fewer GPUs than ranks",
    "ROCm": f"8 on the CPU: {AMD}",
    "old driver": f"8 on the CPU: {OLD}cannot be used",
    "torch without CUDA": f"8 on the CPU: {NO_CUDA}",
    "two kinds": f"8 on the CPU: {KINDS}CUDA_VISIBLE_DEVICES=0,1",
}


@pytest.mark.parametrize("name", MACHINES)
def test_the_smoke_tier_is_planned_on_every_machine(name: str, pretend: Pretend) -> None:
    pretend(name)
    assert end_line(tier("smoke"), planned()) == SMOKE[name]


def test_mxfp8_and_experts_stay_off_the_gpus_that_have_no_kernel_for_them(pretend: Pretend) -> None:
    pretend("8 x H100")
    plan = planned()
    reasons = {plan.choice(case).why for case in tier("pr")}
    assert reasons == {"", "MXFP8 needs compute capability 10.0"}
    assert {case.float8.traits.block for case in tier("pr") if plan.choice(case).device == "cpu"} == {32}


# The table


NEWER = GpuFacts(capability=(10, 0), peers=True)
NEEDED = [  # of the row: a case, GPUs on which it is met, GPUs on which it is not
    ("mxfp8", {"recipe": "mxfp8"}, NEWER, GpuFacts(capability=(9, 0))),
    ("mxfp8_experts", {"recipe": "mxfp8", "grouped_mm": True}, NEWER, GpuFacts(capability=(12, 0))),
    ("blockwise", {"recipe": "blockwise"}, GpuFacts(capability=(9, 0)), NEWER),
    ("float8_experts", {"recipe": "rowwise", "grouped_mm": True}, GpuFacts(capability=(9, 0)), NEWER),
    ("float8", {"recipe": "rowwise"}, GpuFacts(capability=(8, 9)), GpuFacts(capability=(8, 6))),
    ("float8_in_float64", {"recipe": "rowwise", "dtype": "float64"}, None, NEWER),
    ("float8_in_triton", {"recipe": "rowwise", "compile": "inductor"}, NEWER, GpuFacts(capability=(8, 6))),
    ("triton", {"compile": "inductor"}, GpuFacts(capability=(7, 0)), GpuFacts(capability=(6, 1))),
    ("async_tp", {"tp": 2, "async_tp": True}, NEWER, GpuFacts(capability=(10, 0), peers=False)),
]


@pytest.mark.parametrize(("name", "axes", "met_by", "unmet_by"), NEEDED, ids=[row[0] for row in NEEDED])
def test_every_row_of_the_table_holds_where_it_says(
    name: str, axes: dict[str, object], met_by: GpuFacts | None, unmet_by: GpuFacts
) -> None:
    case, plain = make_case(**{"dtype": "bfloat16"} | axes), make_case(dtype="bfloat16")
    assert name in [need.name for need in unmet_needs(case, unmet_by, exact=False)]
    assert met_by is None or name not in [need.name for need in unmet_needs(case, met_by, exact=False)]
    assert not list(unmet_needs(plain, unmet_by, exact=False)), "it asks for nothing of it"


def test_every_row_of_the_table_has_a_test_a_reason_a_source_and_a_place_on_the_page() -> None:
    assert [need.name for need in gpu_needs()] == [row[0] for row in NEEDED]
    assert all(need.reason and need.source and "{" not in need.reason for need in gpu_needs())
    page = (REPOSITORY / "docs" / "plugins" / "gpu.md").read_text()
    section = page.partition("## Which cases run on GPUs")[2].partition("\n## ")[0]
    numbers = {need.reason.rpartition(" ")[2] for need in gpu_needs() if need.since}
    assert numbers == set(re.findall(r"(?<=[| ])\d+\.[\dx]+", section.partition("|---|")[2].partition("\n\n")[0]))


@pytest.mark.parametrize("name", ["triton/backends", "torchao/", "torch/"])
def test_what_the_table_cites_of_installed_packages_is_there(name: str) -> None:
    """C++ sources and Triton are not in this environment; a name that is gone would make a row baseless."""
    folder = Path(click.__file__).parents[1]
    cited = [part.strip() for need in gpu_needs() for part in need.source.split(";")]
    for part in cited:
        file, _, symbol = part.partition(", ")
        if file.startswith(name) and (folder / file).exists():
            assert symbol in (folder / file).read_text(), part


def test_exact_is_chosen_where_only_float64_stands_in_the_way_and_nowhere_else(pretend: Pretend) -> None:
    pretend("1 x H100")
    plan = planned()
    choices = {
        "single-rowwise-v2048-f64": ("cuda", "exact"),
        "single-rowwise-v2048-b16": ("cuda", "kernel"),
        "single-bf16-v2048-f64": ("cuda", "kernel"),
        "single-mxfp8-v2048-f64": ("cpu", "exact"),
        "tp2-rowwise-v2048-f64": ("cpu", "exact"),
    }
    assert {name: plan.choice(parse_case_id(name))[:2] for name in choices} == choices
    asked = planned(arithmetic="kernel")
    assert asked.choice(parse_case_id("single-rowwise-v2048-f64"))[:2] == ("cpu", "kernel")
    assert planned(arithmetic="exact").choice(parse_case_id("single-rowwise-v2048-b16"))[:2] == ("cuda", "exact")


def test_the_reason_is_one_that_no_option_mends(pretend: Pretend) -> None:
    pretend("2 x 4090")
    why = planned().choice(parse_case_id("atp2-tensorwise-graph-v2048-f64")).why
    assert why.startswith("async TP needs GPUs that read each other's memory")


# What is found of a machine


def test_the_build_of_torch_is_read_and_not_imported(pretend: Pretend) -> None:
    pretend(Machine(torch=CUDA_12))
    assert torch_build() == TorchBuild("2.13.0+cu129", cuda="12.9")


@pytest.mark.parametrize(
    ("build", "driver", "architecture", "said"),
    [
        (TorchBuild("2.13.0", "13.0"), "580.65.06", "sm90", ""),
        (TorchBuild("2.13.0", "12.6"), "525.60.13", "sm61", ""),
        (TorchBuild("2.13.0", "13.0"), "575.51", "sm90", "needs 580 or newer"),
        (TorchBuild("2.13.0", "13.0"), "", "sm90", "of an unknown version"),
        (TorchBuild("2.13.0", "13.0"), "580.65", "sm70", "no code for compute capability 7.0"),
        (TorchBuild("2.13.0", "12.6"), "580.65", "sm100", "no code for compute capability 10.0"),
        (TorchBuild("2.13.0", "13.0"), "580.65", "", "does not show their compute capability"),
        (TorchBuild("3.0.0", "14.0"), "600.1", "sm90", "is not known here"),
        (TorchBuild("2.13.0+rocm7", hip="7.1"), "", "", "float8_e4m3fnuz"),
        (TorchBuild("2.13.0+cpu"), "580.65", "sm90", "built without CUDA"),
        (None, "580.65", "sm90", "not installed"),
    ],
)
def test_why_a_build_of_torch_cannot_use_gpus(
    build: TorchBuild | None, driver: str, architecture: str, said: str
) -> None:
    node = NodeCapacity(host="", slots=1, device="cuda", device_name="GPU", driver=driver, architecture=architecture)
    why = unusable(node, build)
    assert (said in why) if said else why == ""


def test_gpus_that_read_each_other_and_the_driver_are_found(pretend: Pretend, tmp_path: Path) -> None:
    pretend("8 x H100")
    environ = {"PATH": os.environ["PATH"]}
    gpus = installed_gpus(environ)
    assert read_each_other(gpus, environ) is True and read_each_other(gpus[:1], environ) is None
    assert read_each_other(gpus, {"PATH": ""}) is None, "nothing says so"
    assert driver_version(environ) == "580.95.05"
    text = (tmp_path / "machine" / "nvidia-smi").read_text()
    (tmp_path / "machine" / "nvidia-smi").write_text(text.replace("OK\tX", "CNS\tX"))
    assert read_each_other(gpus, environ) is False and read_each_other(gpus[2:], environ) is False
    assert read_each_other((gpus[0], gpus[7]), environ) is True
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n")
    assert driver_version({"PATH": ""}, proc=tmp_path / "version") == "535.104.05"
    assert driver_version({"PATH": ""}, proc=tmp_path / "missing") == ""


@pytest.mark.parametrize(
    ("capability", "gpus", "levels"),
    [
        ((8, 6), 1, ()),
        ((8, 6), 2, ("proof",)),
        ((9, 0), 1, ("kernel", "native")),
        ((9, 0), 2, ("kernel", "proof", "native")),
    ],
)
def test_what_gpus_can_prove(capability: tuple[int, int], gpus: int, levels: tuple[str, ...]) -> None:
    assert provable_levels(capability, gpus) == levels


# What is asked for


def test_a_forced_cpu_leaves_gpus_idle_and_says_how_to_verify_them(pretend: Pretend) -> None:
    pretend("8 x H100")
    (case,) = tier("smoke")[:1]
    verify = f"`fp8-harness dev evidence all --device cuda` verifies 8 x {H100}"
    assert end_line([case], planned(device="cpu")) == f"1 on the CPU: --device cpu; {verify}"
    assert end_line([case], planned(backend="gloo")) == f"1 on the CPU: --backend gloo; {verify}"
    assert planned(backend="nccl").device == "cuda" and not planned(backend="nccl").decides


def test_gpus_that_can_prove_nothing_are_not_offered(pretend: Pretend) -> None:
    pretend("laptop")
    assert end_line(tier("smoke")[:1], planned(device="cpu")) == "1 on the CPU: --device cpu"


@pytest.mark.parametrize(
    ("name", "options", "case", "said", "fix"),
    [
        (
            "8 x H100",
            {},
            "tp2-rowwise-v2048-f64",
            "no kernel of a GPU multiplies float8 into float64",
            "--arithmetic exact",
        ),
        ("8 x H100", {"arithmetic": "exact"}, "single-mxfp8-v2048-b16", "MXFP8 needs compute capability 10.0", ""),
        ("1 x H100", {}, "tp2-rowwise-v2048-b16", "more than the 1 slots", ""),
    ],
)
def test_forced_gpus_refuse_what_they_have_not_and_the_fix_works(
    name: str, options: dict[str, object], case: str, said: str, fix: str, pretend: Pretend
) -> None:
    pretend(name)
    cases = [parse_case_id(case)]
    with pytest.raises(HarnessError, match=said) as raised:
        check_fits(cases, planned(device="cuda", **options))
    assert raised.value.fix is not None and fix in raised.value.fix and "--device auto" in raised.value.fix
    check_fits(cases, planned(**options))
    check_fits(cases, planned(device="cpu", **options))
    if fix:
        check_fits(cases, planned(device="cuda", arithmetic="exact"))


def test_forced_gpus_of_unknown_age_are_not_refused() -> None:
    node = replace(make_capacity(8).nodes[0], device="cuda", device_name="GPU")
    plan = Plan(device="cuda", backend="nccl", arithmetic="kernel", capacity=replace(make_capacity(8), nodes=(node,)))
    check_fits([make_case(tp=2, recipe="mxfp8", dtype="bfloat16")], plan)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ""),
        ({"device": "cpu"}, " --device cpu"),
        ({"device": "cuda", "arithmetic": "exact"}, " --device cuda --arithmetic exact"),
        ({"arithmetic": "exact"}, " --arithmetic exact"),
        ({"backend": "gloo"}, " --device cpu --backend gloo"),
    ],
)
def test_the_command_of_a_case_has_the_device_where_a_repeat_needs_it(
    options: dict[str, object], words: str, pretend: Pretend
) -> None:
    pretend("8 x H100")
    case = parse_case_id("tp2-rowwise-v2048-f64")
    plan = planned(**options).of(case)
    assert plan.command("x") == f"fp8-harness run x{words}"


def test_a_study_is_on_one_device_and_its_commands_say_so(pretend: Pretend) -> None:
    pretend("8 x H100")
    plan = planned()
    exact, kernel, blocks = (
        parse_case_id(f"single-{name}") for name in ("rowwise-v2048-f64", "rowwise-v2048-b16", "mxfp8-v2048-b16")
    )

    def common(*cases: Case) -> tuple[Device, Arithmetic, str]:
        own = plan.common(cases)
        return own.device, own.arithmetic, own.command("x").removeprefix("fp8-harness run x")

    assert common(exact) == ("cuda", "exact", "")
    assert common(kernel, kernel) == ("cuda", "kernel", "")
    assert common(exact, kernel) == ("cuda", "exact", " --device cuda --arithmetic exact")
    assert common(exact, blocks) == ("cpu", "exact", " --device cpu")
    assert plan.on_cpu.device == "cpu" and plan.on_gpus.device == "cuda"


@pytest.mark.plugin("parity")
def test_another_torch_gets_the_device_of_the_whole_study(pretend: Pretend) -> None:

    pretend("8 x H100")
    plan = planned()
    exact, blocks = (parse_case_id(f"single-{name}") for name in ("rowwise-v2048-f64", "mxfp8-v2048-b16"))
    base = Against("v1", find_project(), plan.common([exact, blocks]), print)
    assert base.given.words == ("--device", "cpu", "--arithmetic", "exact"), "another torch could choose otherwise"


def test_every_case_is_in_one_part_and_in_the_order_of_selection(pretend: Pretend) -> None:
    pretend("8 x H100")
    cases = tier("pr")
    parts = planned().parts(cases)
    assert sorted(position for _, own in parts for position in own) == list(range(len(cases)))
    assert {(plan.device, plan.arithmetic, plan.backend) for plan, _ in parts} == {
        ("cuda", "kernel", "nccl"),
        ("cuda", "exact", "nccl"),
        ("cpu", "exact", "shared"),
    }
    assert all(plan.capacity.nodes[0].device == plan.device for plan, _ in parts)
    assert len({witness_key(plan) for plan, _ in parts}) == 3, "none is compared with a witness of another"
    assert {plan.hardware[0] for plan, _ in parts} == {"nvidia-h100-80gb-hbm3", "cpu"}, "nor with its golden"


@pytest.mark.plugin("gpu")
def test_evidence_leaves_out_what_the_gpus_cannot_run(pretend: Pretend) -> None:

    pretend("8 x H100")
    cases = tier("pr")
    able, left = without_obstacles(cases, planned(device="cuda", arithmetic="exact"))
    assert left == {"MXFP8 needs compute capability 10.0": len(cases) - len(able)} and able
    able, left = without_obstacles(cases, planned(device="cpu"))
    assert (len(able), left) == (len(cases), {}), "a rehearsal"


def test_the_environment_does_not_depend_on_the_cases(pretend: Pretend, tmp_path: Path) -> None:
    """Shards of a run are merged, and one that was stopped goes on with what is left."""
    pretend("8 x H100")
    both = environment(planned(), tmp_path)
    assert (both.device, both.backend, both.architecture) == (f"8 x {H100}, cpu", "nccl, shared", "sm90")
    assert environment(planned(device="cuda"), tmp_path).device == H100
    assert environment(planned(device="cpu"), tmp_path).device == "cpu"


# Pages


COMMAND = re.compile(r"^(?:\$ )?((?:fp8-harness|mv) [^#\n]+)", re.MULTILINE)
PAGES = {  # each with whether its commands are given in the clone
    "README.md": True,
    "docs/index.md": True,
    "docs/concepts.md": True,
    "docs/your-own-trainer.md": False,
    "docs/plugins/parity.md": False,
    "docs/for-torchao.md": False,
}


def commands_of(page: str) -> list[str]:
    blocks = re.findall(r"^```.*?^```", (REPOSITORY / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    return [text.strip() for block in blocks for text in COMMAND.findall(block)]


def recipe(target: str) -> str:
    """The command of the harness that a target of the Makefile runs."""
    match = re.search(
        rf"^{target}:.*\n\t\$\(BIN\)/(fp8-harness .*)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE
    )
    assert match is not None, target
    return match[1]


class Asked(NamedTuple):
    """A command of a page that starts ranks, with the options of its plan and the cases that it names."""

    text: str
    name: str
    given: dict[str, Any]
    cases: tuple[Case, ...]

    def end_line(self, plan_for: Callable[..., Plan]) -> str:
        """What it says at its end about devices; HarnessError is exit code 2."""
        plan = plan_for(**{name: self.given[name] for name in options_of(PlanOptions) if self.given.get(name)})
        if self.name == "check-target":
            from harness.plugins.check_target.target_check import CheckOptions, cases_there

            return end_line(*cases_there(CheckOptions(target="my_target"), plan))
        if self.name == "parity":
            return end_line(self.cases, plan.common(self.cases))
        if self.name == "update":
            parts = [(plan.on_cpu, self.cases)] if self.given["profiles"] else plan.by_device(self.cases)
            return "".join(end_line(needed_references(cases), own) for own, cases in parts)
        return end_line(self.cases, plan)


def asked(text: str) -> Asked | None:
    """The command, None where it starts no rank. A file that it writes is written."""
    context = understood(text)
    name, given = context.command.name or "", dict(context.params)
    if name == "new" and "--id" not in text:
        done = CliRunner().invoke(app, shlex.split(text)[1:])
        assert done.exit_code == 0, done.output
    if name not in ("run", "parity", "check-target", "update") or given.get("file"):
        return None
    given.pop("inject", None)  # files of the pages, which are not written here
    if name == "parity":
        from harness.studies.layouts import USUAL, cases_of

        layouts = tuple(map(parse_layout, (given["asked"] or "single,fsdp2,tp2,hsdp2x2").split(",")))
        axes = {axis: given[axis] for axis in ("recipe", "dtype", "steps") if given.get(axis)}
        return Asked(text, name, given, tuple(cases_of({**USUAL, **axes}, layouts)))
    sources = given.get("sources", ())
    cases = () if name == "check-target" else select_cases(find_project(None, sources), Query(sources=sources))
    return Asked(text, name, given, tuple(cases))


@pytest.fixture(scope="module")
def of_pages(tmp_path_factory: pytest.TempPathFactory) -> list[Asked]:
    """The commands of all pages that start ranks. What they ask for does not depend on the machine."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for page, in_the_clone in PAGES.items():
            folder = tmp_path_factory.mktemp("page")
            (folder / "golden").mkdir()
            (folder / "cases").mkdir()
            if in_the_clone:
                shutil.copytree(REPOSITORY / "cases", folder / "cases", dirs_exist_ok=True)
            patch.chdir(folder)
            for text in commands_of(page):
                if text.startswith("mv "):
                    _, old, new = text.split()
                    Path(old).rename(new)
                else:
                    found.append(asked(text))
        found.append(asked(recipe("smoke")))
    assert len(found) > 30
    return [command for command in found if command is not None]


@pytest.mark.parametrize("name", MACHINES)
def test_no_command_of_the_first_pages_ends_before_a_rank_starts(
    name: str, pretend: Pretend, of_pages: list[Asked]
) -> None:
    pretend(name)
    assert {command.name for command in of_pages} == {"run", "parity", "check-target", "update"}
    plan_for = functools.cache(planned)  # nvidia-smi is asked once for the same options
    said = {command.text: command.end_line(plan_for) for command in of_pages}
    plan = planned()
    if plan.decides:
        smoke = said[recipe("smoke")]
        assert ("verifies" in smoke) == bool(plan.idle), "it names the command for the GPUs"
        assert said["fp8-harness run smoke"] == SMOKE[name]
    elif plan.unused:
        assert all(plan.unused in line for text, line in said.items() if "--device" not in text and line), said
    else:
        assert set(said.values()) == {""}
