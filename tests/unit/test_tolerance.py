"""Tolerances: no number without evidence, none below the noise, none far above it."""

import contextlib
import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.errors import HarnessError
from harness.evidence.sealed import Damaged
from harness.evidence.tolerance import (
    CHECKS,
    LOSS_VS_GOLDEN,
    MAX_MARGIN,
    MIN_LAYOUTS,
    MIN_MARGIN,
    MIN_SEEDS,
    PARITY,
    TABLE_FILE,
    Evidence,
    Sample,
    ToleranceMissing,
    ToleranceUnfounded,
    evidence_path,
    fit,
    measured_steps,
    noise,
    parity_key,
    problems,
    read_evidence,
    read_table,
    tolerance_for,
    tolerance_key,
    write_evidence,
)
from harness.matrix.case import Case, Checks, Float8, Model, Train
from harness.matrix.caseid import parse_case_id
from harness.sources import installed_versions

KEY = "tiny-tensorwise-float32"
NOISE = (0.01, 0.02, 0.04)
LAYOUTS = ("single", "tp2", "fsdp2")


PROJECT = Path(__file__).parents[2]
OTHER = Model(layers=3)  # which the package measured nothing of


def case(steps: int = 3, **checks: float) -> Case:
    return Case(float8=Float8(recipe="tensorwise"), train=Train(steps=steps), checks=Checks(**checks))


def sample(seed: int, layout: str, per_step: tuple[float, ...] = NOISE, key: str = KEY) -> Sample:
    case_id = f"{layout}-tensorwise-v2048{f'-seed{seed}' if seed else ''}-f32"
    return Sample(key=key, case_id=case_id, layout=layout, seed=seed, per_step=per_step)


def samples(per_step: tuple[float, ...] = NOISE, *, seeds: int = MIN_SEEDS, layouts: int = MIN_LAYOUTS) -> list[Sample]:
    return [sample(seed, layout, per_step) for seed in range(seeds) for layout in LAYOUTS[:layouts]]


def store(root: Path, table: str, stored: list[Sample] | None = None) -> Path:
    evidence = Evidence(
        samples=tuple(samples() if stored is None else stored),
        software={"torch": "2.13.0"},
        device="cpu",
        command="c",
        created="2026-01-01T00:00:00+00:00",
    )
    write_evidence(root, evidence)
    (root / TABLE_FILE).write_text(table)
    return root


def table(allowed: object = "[0.02, 0.04, 0.08]", margin: object = 3.0, key: str = KEY) -> str:
    return f"[loss_vs_golden.{key}]\nallowed = {allowed}\nmargin = {margin}\n"


def validate_tolerances(root: Path) -> None:
    """Raises as the use of a number does, for every number of the table that its evidence does not support."""
    all_problems: list[str] = []
    for check, entries in read_table(root).items():
        for key, entry in entries.items():
            of_key = [measured for measured in read_evidence(root, check).samples if measured.key == key]
            all_problems += problems(check, key, entry, of_key)
    if all_problems:
        raise ToleranceUnfounded("; ".join(all_problems))


def test_the_numbers_reach_the_case_and_those_of_the_case_win(tmp_path: Path) -> None:
    store(tmp_path, table())
    tolerance = tolerance_for(case(), tmp_path)
    assert (tolerance.key, tolerance.per_step) == (KEY, (0.02, 0.04, 0.08))
    assert tolerance.evidence == f"{MIN_SEEDS * MIN_LAYOUTS} samples, {MIN_SEEDS} seeds"
    assert tolerance_for(case(steps=2), tmp_path).per_step == (0.02, 0.04)
    assert tolerance_for(case(steps=50, loss_tolerance=0.5), tmp_path).per_step == (0.5,) * 50


def test_what_a_nightly_measured_holds_for_no_other_build(tmp_path: Path) -> None:
    store(tmp_path, table())
    measured = read_evidence(tmp_path)
    here = installed_versions(["torch", "torchao"])
    for software in ({"torch": "2.16.0.dev20261120"}, here | {"torchao": "0.19.0+git12"}):
        write_evidence(tmp_path, msgspec.structs.replace(measured, software=software))
        with pytest.raises(ToleranceMissing, match="measured with an unreleased build, and hold for no other one"):
            tolerance_for(case(), tmp_path)
    write_evidence(tmp_path, msgspec.structs.replace(measured, software={"torch": "1.0.0"}))
    assert tolerance_for(case(), tmp_path).key == KEY


@pytest.mark.parametrize(("batch", "factor"), [(8, 1), (16, 1), (2, 2), (1, math.sqrt(8))])
def test_a_loss_over_fewer_tokens_is_a_mean_of_fewer_errors(tmp_path: Path, batch: int, factor: float) -> None:
    store(tmp_path, table())
    smaller = msgspec.structs.replace(case(), train=Train(steps=3, global_batch=batch))
    tolerance = tolerance_for(smaller, tmp_path)
    assert tolerance.per_step == pytest.approx((0.02 * factor, 0.04 * factor, 0.08 * factor))
    assert tolerance.evidence.endswith("seeds" if factor == 1 else f"times {factor:.3g} for {32 * batch} tokens")


def test_steps_beyond_what_was_measured_are_an_error(tmp_path: Path) -> None:
    store(tmp_path, table("0.05"))
    assert tolerance_for(case(), tmp_path).per_step == (0.05,) * 3
    with pytest.raises(ToleranceMissing, match="covers 3 steps, the case trains 4"):
        tolerance_for(case(steps=4), tmp_path)
    store(tmp_path, table("[0.02, 0.04]"))
    with pytest.raises(ToleranceMissing, match="covers 2 steps, the case trains 3") as caught:
        tolerance_for(case(), tmp_path)
    assert "tolerance --measure" in (caught.value.fix or "") and "loss_tolerance" in (caught.value.fix or "")


def test_a_kind_of_case_that_was_not_measured_is_an_error_with_and_without_an_output_layer(tmp_path: Path) -> None:
    store(tmp_path, table())
    head = Float8(recipe="tensorwise", output_layer=True)
    for float8, key in ((Float8(), "bf16-float32"), (head, "tensorwise-head-float32")):
        with pytest.raises(ToleranceMissing, match=f"tiny_layers3-{key}"):
            tolerance_for(Case(model=OTHER, float8=float8, train=Train(steps=3)), tmp_path)


def test_what_a_project_did_not_measure_is_as_far_off_as_the_package_measured(tmp_path: Path) -> None:
    assert tolerance_for(case(), tmp_path) == tolerance_for(case(), PROJECT)
    store(tmp_path, table())
    assert tolerance_for(case(), tmp_path).per_step == (0.02, 0.04, 0.08) != tolerance_for(case(), PROJECT).per_step
    assert tolerance_for(Case(), tmp_path) == tolerance_for(Case(), PROJECT)


def test_keys_tell_models_recipes_dtypes_and_output_layers_apart() -> None:
    assert tolerance_key(case()) == KEY
    assert tolerance_key(Case(train=Train(dtype="bfloat16"))) == "tiny-bf16-bfloat16"
    assert tolerance_key(Case(model=Model(preset="debug", layers=3))) == "debug_layers3-bf16-float32"
    assert tolerance_key(Case(model=Model(vocab_size=2560))) == tolerance_key(Case())
    head = Float8(recipe="tensorwise", output_layer=True)
    assert tolerance_key(Case(float8=head)) == "tiny-tensorwise-head-float32"
    assert tolerance_key(Case(float8=Float8(recipe="tensorwise", output_layer=True, filter_fqns=("output",)))) == KEY


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (table("[0.02, 0.019, 0.08]"), "step 2: 0.019 is below the measured noise 0.02"),
        (table("[0.02, 0.0601, 0.08]"), "step 2: 0.0601 is above 0.06"),
        (table("0.039"), "0.039 is below the measured noise 0.04"),
        (table("0.121"), "0.121 is above 0.12"),
        (table("[0.02, nan, 0.08]"), "step 2: nan is below"),
        (table("nan"), "nan is below"),
        (table("inf"), "inf is above"),
        (table("[]"), "the list is empty"),
        (table("[0.02, 0.04, 0.08, 0.08]"), "names 4 steps, the evidence covers 3"),
        (table(margin=1.0), "margin 1.0 is not between"),
        (table(margin=5.1), "margin 5.1 is not between"),
        (table(margin="nan"), "margin nan is not between"),
        (table() + table(key="tiny-rowwise-float32"), "tiny-rowwise-float32: no step was measured"),
        ("[loss]\n", "unknown check 'loss'"),
        ("[loss_vs_golden", "is not readable"),
        ("[loss_vs_golden.x]\nallowed = 1\n", "is not readable"),
        ("[loss_vs_golden.x]\nallowed = 1\nmargin = 2\nmargins = 3\n", "is not readable"),
        ("[loss_vs_golden.x]\nallowed = '1'\nmargin = 2\n", "is not readable"),
    ],
)
def test_a_number_that_its_evidence_does_not_carry_is_named(tmp_path: Path, text: str, why: str) -> None:
    store(tmp_path, text)
    with pytest.raises(ToleranceUnfounded, match=why.replace("[", r"\[")):
        validate_tolerances(tmp_path)


@pytest.mark.parametrize("allowed", ["[0.01, 0.02, 0.04]", "[0.03, 0.06, 0.12]", "0.04", "0.12"])
def test_the_bounds_themselves_are_carried(tmp_path: Path, allowed: str) -> None:
    validate_tolerances(store(tmp_path, table(allowed)))
    validate_tolerances(store(tmp_path, table("[0.011, 0.02, 0.04]", margin=MIN_MARGIN)))
    validate_tolerances(store(tmp_path, table("[0.011, 0.02, 0.04]", margin=MAX_MARGIN)))


def test_an_unfounded_number_is_not_used_and_every_problem_is_told_at_once(tmp_path: Path) -> None:
    store(tmp_path, table("[0.02, 0.04, 9.0]"))
    with pytest.raises(ToleranceUnfounded, match="step 3"):
        tolerance_for(case(), tmp_path)
    store(tmp_path, table("[0.0, 0.04, 9.0]"))
    with pytest.raises(ToleranceUnfounded, match=r"step 1: .*step 3: "):
        validate_tolerances(tmp_path)


@pytest.mark.parametrize(
    ("all_samples", "steps"),
    [
        ([], 0),
        (samples(), 3),
        (samples(seeds=MIN_SEEDS - 1), 0),
        (samples(layouts=MIN_LAYOUTS - 1), 0),
        ([*samples(), sample(99, "tp8", (0.01,) * 9)], 3),
        ([*samples(), *samples((0.1,) * 5)], 5),
        ([*samples((0.1,)), *samples((0.1,) * 5, seeds=MIN_SEEDS - 1)], 1),
    ],
)
def test_a_step_counts_as_measured_with_enough_seeds_and_layouts(all_samples: list[Sample], steps: int) -> None:
    assert measured_steps(all_samples) == steps
    assert len(noise(LOSS_VS_GOLDEN, all_samples)) == steps


def test_noise_is_the_largest_sample_never_falls_and_may_flip_in_step_2() -> None:
    all_samples = [*samples((0.01, 0.02, 0.005)), sample(3, "tp2", (0.001, 0.03, 0.001))]
    assert noise(LOSS_VS_GOLDEN, all_samples) == (0.01, 0.03, 0.03)
    all_samples = [*samples((1e-8, 1e-8, 2e-8, 2e-8)), sample(0, "fsdp2", (1e-8, 2e-8, 1e-8, 0.02))]
    all_samples.append(sample(1, "fsdp2", (2e-8, 1e-8, 0.01, 0.05)))
    assert noise(PARITY, all_samples) == (2e-8, 0.02, 0.05, 0.05)
    assert noise(LOSS_VS_GOLDEN, all_samples) == (2e-8, 2e-8, 0.01, 0.05)
    assert noise(PARITY, samples((0.01, 0.02, 0.09))) == (0.01, 0.02, 0.09)


distances = st.floats(0, 10) | st.floats(1e-12, 1e-3)


@example([(5e-324, 5e-324)] * MIN_SEEDS, 2.0)
@given(
    st.lists(st.tuples(distances, distances), min_size=MIN_SEEDS, max_size=MIN_SEEDS), st.floats(MIN_MARGIN, MAX_MARGIN)
)
def test_what_is_fitted_lies_between_noise_and_margin(measured: list[tuple[float, float]], margin: float) -> None:
    all_samples = [sample(seed, layout, pair) for seed, pair in enumerate(measured) for layout in LAYOUTS]
    fitted = fit(LOSS_VS_GOLDEN, all_samples, margin)
    assert len(fitted) == 2
    assert all(
        low <= value <= low * margin for low, value in zip(noise(LOSS_VS_GOLDEN, all_samples), fitted, strict=True)
    )


def test_what_is_fitted_has_three_digits() -> None:
    assert fit(LOSS_VS_GOLDEN, samples((0.0, 0.0123456, 0.5)), 2.0) == (0.0, 0.0246, 1.0)


@pytest.mark.parametrize("measured", [(0.0, 0.0, 0.0), (1e-9, 0.001234567, 7.0), (0.5, 0.1, 0.3)])
@pytest.mark.parametrize("margin", [MIN_MARGIN, 2.7182818, MAX_MARGIN])
def test_what_is_fitted_is_carried_by_its_samples(tmp_path: Path, measured: tuple[float, ...], margin: float) -> None:
    all_samples = samples(measured)
    validate_tolerances(store(tmp_path, table(list(fit(LOSS_VS_GOLDEN, all_samples, margin)), margin), all_samples))


@pytest.mark.parametrize("per_step", [(), (math.nan,), (math.inf,), (-0.1,), (0.1, math.nan), (-0.1, 0.1)])
def test_what_is_no_distance_is_not_stored(tmp_path: Path, per_step: tuple[float, ...]) -> None:
    with pytest.raises(ToleranceUnfounded, match="not a distance"):
        store(tmp_path, table(), [sample(0, "single", per_step)])


def test_samples_are_stored_in_one_order(tmp_path: Path) -> None:
    store(tmp_path, table(), samples())
    first = (evidence_path(tmp_path, LOSS_VS_GOLDEN)).read_bytes()
    store(tmp_path, table(), list(reversed(samples())))
    assert (evidence_path(tmp_path, LOSS_VS_GOLDEN)).read_bytes() == first


def test_evidence_that_was_edited_or_is_gone_is_found(tmp_path: Path) -> None:
    store(tmp_path, table())
    path = evidence_path(tmp_path, LOSS_VS_GOLDEN)
    path.write_text(path.read_text().replace("0.04", "0.4", 1))
    for read in (read_evidence, validate_tolerances, lambda root: tolerance_for(case(), root)):
        with pytest.raises(Damaged, match="digest"):
            read(tmp_path)
    store(tmp_path, table())
    (evidence_path(tmp_path, LOSS_VS_GOLDEN)).unlink()
    for read in (validate_tolerances, lambda root: tolerance_for(case(), root)):
        with pytest.raises(ToleranceUnfounded, match="no distances were measured"):
            read(tmp_path)


@given(st.binary(max_size=60))
def test_any_table_reads_or_is_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    root = tmp_path_factory.mktemp("root")
    (root / TABLE_FILE).parent.mkdir()
    (root / TABLE_FILE).write_bytes(content)
    with pytest.raises(HarnessError):
        tolerance_for(Case(model=OTHER), root)


@pytest.mark.skipif(not (PROJECT / TABLE_FILE).exists(), reason="no tolerance is written yet")
def test_the_numbers_of_this_project_are_carried_by_their_evidence() -> None:
    assert all(map(read_table(PROJECT).get, CHECKS))
    validate_tolerances(PROJECT)


@pytest.mark.parametrize(
    ("case", "key"),
    [
        ("tp2-rowwise-v2048-f64", "exact"),
        ("fsdp2-rowwise-v2048-b16", "ordered"),
        ("hsdp2x2-rowwise-v2048-b16", "tiny-rowwise-replicas-bfloat16"),
        ("hsdp2x2-tp2-rowwise-v2048-b16", "tiny-rowwise-bfloat16"),
        ("tp4-rowwise-graph-v2048-f32", "tiny-rowwise-float32"),
        ("hsdp2x2-rowwise-inductor-v2048-f32", "tiny-rowwise-float32"),
        ("tp2-rowwise-debug-layers.3-v2048-b16", "debug_layers3-rowwise-bfloat16"),
        ("tp2-rowwise-v2048-lr0.01-b16", "tiny_lr0.01-rowwise-bfloat16"),
        ("fsdp2-rowwise-debug-v2048-lr0.01-b16", "ordered"),
    ],
)
def test_hsdp_is_another_kind_than_tp(case: str, key: str) -> None:
    assert parity_key(parse_case_id(case)) == key


@pytest.mark.parametrize(("quiet", "founded"), [(0.02, True), (0.005, False), (1e-9, False)])
def test_layouts_of_one_key_must_be_of_one_kind(tmp_path: Path, quiet: float, founded: bool) -> None:
    """In the first step; what training makes of it is chance."""
    first = {LAYOUTS[0]: 0.1, LAYOUTS[1]: quiet}
    all_samples = [sample(seed, name, (off, 0.1, 0.1)) for seed in range(MIN_SEEDS) for name, off in first.items()]
    root = store(tmp_path, f"[{PARITY}.{KEY}]\nallowed = 0.2\nmargin = 3.0\n")
    write_evidence(root, msgspec.structs.replace(read_evidence(root), samples=tuple(all_samples)), PARITY)
    told = pytest.raises(ToleranceUnfounded, match=r"single is up to .* off in step 1")
    with contextlib.nullcontext() if founded else told:
        validate_tolerances(root)
