"""The tables of the page: every format from four layouts, which formats are idempotent, and which names are taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.matrix.caseid import parse_case_id
from harness.plugins.handoff.agreement import MATCHERS
from harness.plugins.handoff.cases import judged_case
from harness.plugins.handoff.formats import FORMATS
from harness.plugins.handoff.library import Also, judge
from harness.plugins.handoff.worker.cases import build
from harness.plugins.handoff.worker.export import export, load
from tests.plugins.handoff.trainers import weights

PAGE = (Path(__file__).parents[4] / "docs/plugins/handoff.md").read_text()
NAMES = [name for name, form in FORMATS.items() if form.dtype]
CASES = (
    "fsdp2-tp2-rowwise-v2048-s2-b16",
    "hsdp2x2-tensorwise-v2048-s2-b16",
    "fsdp2-ep2-rowwise-gmm.fp8-moe4-v2048-s2-b16",
    "pp2-rowwise-v2048-s2-accum4-reduce.last-b16",
)


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


@pytest.mark.sweep  # thirteen seconds each
@pytest.mark.parametrize("case_id", CASES)
def test_every_format_is_handed_off_from_four_layouts(case_id: str, fp8_ranks: Callable[..., list[Any]]) -> None:
    case = parse_case_id(case_id)
    given = case_id, NAMES, "", []
    ranks = fp8_ranks(build, case.world_size, *given, [])
    (one_rank,) = fp8_ranks(build, 1, *given, [made["source"] for made in ranks])
    judged = [judged_case(case, name, ranks, one_rank, {"also": Also()}) for name in NAMES]
    assert [each.findings for each in judged] == [()] * len(NAMES)
    first = judged[0]
    assert row(f"`{case_id}`", case.world_size, first.weights, first.quantized, f"{first.values:,}") in PAGE


@pytest.mark.parametrize("name", NAMES)
def test_which_formats_are_idempotent(name: str) -> None:
    form, changed = FORMATS[name], []
    for dtype in (torch.float32, torch.bfloat16):
        source = {fqn: each.to(dtype) for fqn, each in weights().items()}
        first = export(source, form)
        again = export(load(first, form, dtype), form)
        both = [judge(source, first, format=name, also=Also(again=made)) for made in (first, again)]
        assert not both[0].findings
        changed.append(len(both[1].findings))
        third = export(load(again, form, dtype), form)
        assert not judge(source, first, format=name, also=Also(again=third, idempotent=False)).findings
        assert all(torch.equal(one.float(), third[fqn].float()) for fqn, one in again.items())
    assert row(f"`{name}`", *changed) in PAGE


PARTS = [f"self_attn.{part}_proj" for part in "qkvo"], [f"{part}_proj" for part in ("gate", "up", "down")]
LLAMA = [f"model.layers.{at}.{part}" for at in range(12) for part in (*PARTS[0], *(f"mlp.{one}" for one in PARTS[1]))]
OF_EXPERTS = ("mlp.gate", "mlp.shared_expert_gate", *(f"mlp.shared_expert.{part}" for part in PARTS[1]))
EXPERTS = [f"mlp.experts.{expert}.{part}" for expert in range(4) for part in PARTS[1]]
MIXTURE = [f"model.layers.{at}.{part}" for at in range(12) for part in (*PARTS[0], *OF_EXPERTS, *EXPERTS)]


@pytest.mark.parametrize("entry", ["lm_head", "mlp.gate", "model.layers.1", "model.layers.0.mlp.gate"])
@pytest.mark.parametrize(("model", "names"), [("Llama", LLAMA), ("mixture", MIXTURE)])
def test_which_modules_an_entry_takes_by_each_rule(entry: str, model: str, names: list[str]) -> None:
    rules = ("torchao", "transformers", "vllm", "compressed-tensors")
    taken = [sum(MATCHERS[rule](entry, name) for name in (*names, "lm_head")) for rule in rules]
    assert row(f"`{entry}`, {model}", *taken) in PAGE
