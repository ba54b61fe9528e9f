"""What must not change a number does not: every relation on real ranks, the order of a batch, powers of two."""

from __future__ import annotations

import msgspec
import pytest

from harness.checks.assembly import SketchKey, assemble, relative_distance
from harness.checks.metamorphic import check_metamorphic
from harness.checks.witnesses import Witnesses
from harness.spec.case import Case
from harness.spec.caseid import case_id, parse_case_id
from harness.spec.relations import Relation, partner, relations
from harness.trace import RankTrace, Run
from harness.verdict import Finding


@pytest.fixture(scope="module")
def sketched(train):
    """Train a case once for all tests of this file."""
    kept: dict[tuple[object, ...], Run] = {}

    def run(case: Case, *, injections: tuple[str, ...] = (), probes: tuple[str, ...] = ("sketches",)) -> Run:
        key = (case_id(case), injections, probes)
        if key not in kept:
            kept[key] = Run(traces=train(case, probes=probes, injections=injections), failures=())
        return kept[key]

    return run


def findings(case: Case, relation: Relation, run: Run, other: Run) -> list[Finding]:
    given = Witnesses(
        golden=None,
        tolerance=None,
        refusal=None,
        expected_fqns=(),
        expected_scaled_mm=0,
        relation=relation,
        partner=other,
    )
    return check_metamorphic(case, run, given)


@pytest.mark.parametrize(
    "text",
    [
        "tp8-tensorwise-v2050-gb4-s1-f64",
        "atp2-fallback-rowwise-ac.op-graph-v2048-gb2-s2-b16",
        "fsdp2-atp2-tensorwise-tpstyle.fp8-ac.full-graph-v2048-gb2-s2-b16",
        "tp2-nosp-tensorwise-graph-v2048-gb2-s2-f32",
        "tp4-rowwise-ac.op-v2050-gb4-s1-f64",
        "tp2-nosp-nolp-tensorwise-tpstyle.fp8-head.fp8-pad-v2048-gb4-s2-f64",
        "tp2-rowwise_with_gw_hp-ac.full-v2048-gb4-s2-b16",
        "fsdp2-tensorwise-ag.fp8pre-ac.layer2-v2048-gb4-s2-f32",
        "fsdp2-tensorwise-ag.fp8pre-ac.op-v2048-gb4-s2-b16",
        "fsdp3-bf16-ac.full-v2048-gb6-s2-f32",
        "hsdp2x2-tensorwise-ag.fp8pre-v2048-gb4-s2-f64",
        "fsdp2-tp2-tensorwise-ag.fp8pre-tpstyle.fp8-ac.op-v2048-gb4-s2-b16",
        "fsdp2-tp2-nosp-rowwise-v2048-gb4-s1-f64",
    ],
)
def test_every_relation_of_a_case_holds(sketched, text: str):
    case = parse_case_id(text)
    promised = relations(case)
    assert promised
    for relation in promised:
        assert findings(case, relation, sketched(case), sketched(relation.partner)) == [], relation.name


@pytest.mark.parametrize(
    "text",
    [
        "hsdp2x2-tensorwise-ag.fp8pre-pad-ac.op-v2048-gb4-s2-f32",
        "fsdp2-tp2-tensorwise-ag.fp8pre-tpstyle.fp8-ac.op-v2048-gb4-s2-b16",
    ],
)
def test_the_partner_of_a_case_has_its_bits(sketched, text: str):
    case = parse_case_id(text)
    relation = partner(case)
    assert relation is not None and "+" in relation.name
    assert findings(case, relation, sketched(case), sketched(relation.partner)) == []


FAULTS = '''
import torch
from torchao.float8 import float8_scaling_utils, float8_utils, fsdp_utils

def recompute_with_another_scale():
    """Half of the range unused in a recompute: as good a scale as any, but not the one of the forward."""
    right = float8_scaling_utils.tensor_to_scale
    def wrong(*args, **options):
        scale = right(*args, **options)
        return scale * 0.5 if torch._C._current_graph_task_id() != -1 else scale
    float8_scaling_utils.tensor_to_scale = wrong

def recompute_off_by_one_bit():
    from torch import nn
    right = nn.functional.silu
    def wrong(x):
        y = right(x)
        return y * (1 + 2**-7) if torch._C._current_graph_task_id() != -1 else y
    nn.functional.silu = wrong

def styles_round_their_scales():
    from torchao.float8 import float8_tensor_parallel
    right = float8_tensor_parallel.hp_tensor_to_float8_dynamic
    def wrong(*args, **options):
        return right(*args, **options, round_scales_to_power_of_2=True)
    float8_tensor_parallel.hp_tensor_to_float8_dynamic = wrong

def stale_precomputed_scale():
    import harness.worker.float8 as float8
    right = float8.precompute_float8_dynamic_scale_for_fsdp
    done = []
    def once(model):
        if not done:
            right(model)
        done.append(1)
    float8.precompute_float8_dynamic_scale_for_fsdp = once
'''


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    path = tmp_path_factory.mktemp("faults") / "faults.py"
    path.write_text(FAULTS)
    return lambda name: (f"{path}:{name}",)


@pytest.mark.parametrize(
    ("fault", "text", "step"),
    [
        ("recompute_with_another_scale", "tp2-tensorwise-ac.full-v2048-gb4-s2-b16", 1),
        ("recompute_off_by_one_bit", "tp2-rowwise-ac.full-v2048-gb4-s2-b16", 1),
        ("styles_round_their_scales", "tp2-tensorwise-tpstyle.fp8-v2048-gb4-s2-b16", 1),
        ("stale_precomputed_scale", "hsdp2x2-tensorwise-ag.fp8pre-v2048-gb4-s3-b16", 3),
    ],
)
def test_a_fault_that_bfloat16_parity_is_blind_to_is_found(sketched, faults, fault: str, text: str, step: int):
    """Worst gradients are 0.13, 0.06, 0.16 and 0.09 from the solo witness; clean ones 0.11, 0.06, 0.11 and 4e-10.

    Parity allows 0.29 to tensorwise and 0.15 to rowwise bfloat16 layouts that add up in another order.
    """
    case = parse_case_id(text)
    relation = partner(case)
    assert relation is not None
    broken = sketched(case, injections=faults(fault))
    found = findings(case, relation, broken, sketched(relation.partner))
    assert found and min(finding.step for finding in found) == step
    assert all(finding.module for finding in found if "gradients" in finding.message)


INITIAL_PRECOMPUTE = """
def apply():
    import harness.worker.train as train
    from harness.worker.float8 import after_optimizer_step
    right = train.build
    def build(case, device, **options):
        target = right(case, device, **options)
        after_optimizer_step(target.model, case.float8)
        return target
    train.build = build
"""


def test_where_fsdp_meets_tp_a_dynamic_scale_belongs_to_a_tp_rank(sketched, tmp_path):
    """torchao 0.18. When this fails, the inconsistency is gone: promise `fp8_all_gather` there, too."""
    patch = tmp_path / "patch.py"
    patch.write_text(INITIAL_PRECOMPUTE)
    off = parse_case_id("fsdp2-tp2-tensorwise-v2048-gb4-s2-f64")
    dynamic = parse_case_id("fsdp2-tp2-tensorwise-ag.fp8-v2048-gb4-s2-f64")
    precomputed = parse_case_id("fsdp2-tp2-tensorwise-ag.fp8pre-v2048-gb4-s2-f64")
    same = Relation(name="fp8_all_gather", partner=off, promise="bitwise", reason="it should be")
    assert findings(dynamic, same, sketched(dynamic), sketched(off))
    always = sketched(precomputed, injections=(f"{patch}:apply",))  # before the first step, too
    assert findings(precomputed, same, always, sketched(off)) == []


SWAPPED = """
def apply():
    import numpy as np
    import harness.worker.target as target
    right = target.global_tokens
    def swapped(case):
        tokens = right(case)
        order = np.arange(case.train.global_batch).reshape(case.layout.dp, -1)[:, ::-1].reshape(-1)
        return tokens[:, order].copy()
    target.global_tokens = swapped
"""


@pytest.mark.parametrize("text", ["fsdp2-tensorwise-v2048-gb4-s2-f64", "tp2-rowwise-v2048-gb4-s2-f64"])
def test_the_order_of_sequences_within_a_rank_changes_nothing(sketched, tmp_path_factory, text: str):
    patch = tmp_path_factory.mktemp("swap") / "patch.py"
    patch.write_text(SWAPPED)
    case = parse_case_id(text)
    straight, swapped = sketched(case), sketched(case, injections=(f"{patch}:apply",))
    assert straight.traces[0].data_digest != swapped.traces[0].data_digest, "nothing was swapped"
    for here, there in zip(straight.traces, swapped.traces, strict=True):
        assert [step.loss for step in there.steps] == pytest.approx([step.loss for step in here.steps], rel=1e-12)
    found, expected = assemble(swapped.traces), assemble(straight.traces)
    assert max(relative_distance(found[key], expected[key]) for key in expected) < 1e-12


RESCALED = """
def apply():
    import harness.worker.target as target
    right = target.initial_weights
    def rescaled(model, case):
        factors = {"attention.wq.weight": 2.0, "attention.wk.weight": 0.5}
        weights = right(model, case)
        for fqn in weights:
            weights[fqn] = weights[fqn] * factors.get(fqn.split(".", 2)[-1], 1)
        return weights
    target.initial_weights = rescaled
"""


def weight_casts(trace: RankTrace, name: str) -> list[tuple[str, int, float, str]]:
    assert trace.operands is not None
    return [
        (cast.fqn, cast.index, cast.scale.maximum, cast.data_digest)
        for cast in trace.operands.casts
        if cast.role == "weight" and name in cast.fqn and cast.phase in ("forward", "recompute", "all_gather")
    ]


@pytest.mark.parametrize(
    "text",
    [
        "tp2-tensorwise-v2048-gb4-s1-f32",
        "fsdp2-tensorwise-ag.fp8-v2048-gb4-s1-b16",
        "fsdp2-tp2-tensorwise-ac.full-v2048-gb4-s1-f64",
    ],
)
def test_a_power_of_two_moved_from_wk_to_wq_changes_no_bit_of_the_loss(sketched, tmp_path_factory, text: str):
    """Attention sees q * k alone. Scales and gradients move by exactly that power of two, float8 values not at all."""
    patch = tmp_path_factory.mktemp("rescale") / "patch.py"
    patch.write_text(RESCALED)
    case = parse_case_id(text)
    probes = ("sketches", "operands")
    plain, rescaled = sketched(case, probes=probes), sketched(case, injections=(f"{patch}:apply",), probes=probes)
    assert plain.traces[0].data_digest != rescaled.traces[0].data_digest, "nothing was rescaled"
    for here, there in zip(plain.traces, rescaled.traces, strict=True):
        assert there.steps[0].loss == here.steps[0].loss
        for name, factor in (("wq", 2.0), ("wk", 0.5), ("wv", 1.0)):
            expected = [(fqn, at, scale / factor, digest) for fqn, at, scale, digest in weight_casts(here, name)]
            assert weight_casts(there, name) == expected and expected
    found, expected = assemble(rescaled.traces), assemble(plain.traces)
    for key in (key for key in expected if key.kind == "grad"):
        factor = {"wq": 2.0, "wk": 0.5}.get(key.fqn.split(".")[-2], 1.0)
        assert [factor * value for value in found[key].sums] == list(expected[key].sums), key


def test_rescaling_shows_where_it_should(sketched, tmp_path):
    """The test above has teeth: with a factor on wq alone the loss is another one."""
    patch = tmp_path / "patch.py"
    patch.write_text(RESCALED.replace('"attention.wk.weight": 0.5', ""))
    case = parse_case_id("tp2-tensorwise-v2048-gb4-s1-f32")
    there = sketched(case, injections=(f"{patch}:apply",))
    assert there.traces[0].steps[0].loss != sketched(case).traces[0].steps[0].loss
    key = SketchKey(1, "grad", "layers.0.attention.wv.weight")
    assert relative_distance(assemble(there.traces)[key], assemble(sketched(case).traces)[key]) > 1e-3


def test_a_bfloat16_cast_comes_before_or_after_the_gather(sketched):
    """Why `fp8_all_gather` is not promised in bfloat16."""
    case = parse_case_id("fsdp2-tensorwise-ag.fp8-v2048-gb4-s1-b16")
    off = msgspec.structs.replace(case, float8=msgspec.structs.replace(case.float8, fp8_all_gather=False))
    same = Relation(name="fp8_all_gather", partner=off, promise="bitwise", reason="it is not")
    assert findings(case, same, sketched(case), sketched(off))
