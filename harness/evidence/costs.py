"""What cases cost: CPU seconds by a model that was fitted to measured runs, stored in `golden/evidence/costs.json`.

A case costs its ranks times what its features add to a rank: converting, tensor parallelism, compiling. The model is
within a fifth of what was measured, over two orders of magnitude; it serves to choose and to budget cases that were
never run. How a tier is chosen is `matrix/choice.py`'s, how the numbers are fitted `studies/costs.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from harness.errors import HarnessError
from harness.evidence.sealed import Sealed, own_root, read_sealed, write_sealed
from harness.expect.relations import partner
from harness.hints import fit_costs
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, solo_case
from harness.matrix.cheap_cover import Price
from harness.matrix.rules import expected_refusal

SCHEMA = 1
_REFUSED_SHARE = 0.15  # a refused case ends in the first forward or backward pass


class CostsDamaged(HarnessError):
    """The file of costs is missing or is not what the tool wrote."""


class Costs(Sealed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CPU seconds by feature, of the ranks of a case and of a solo witness, and what they were fitted to."""

    case: Mapping[str, float]
    solo: Mapping[str, float]
    cases_fitted: int
    witnesses_fitted: int
    typical_error: float  # half of the fitted cases are at least this close, relative to what was measured
    software: Mapping[str, str]
    cpu: str
    command: str
    created: str  # UTC, ISO 8601

    def case_s(self, case: Case) -> float:
        """CPU seconds of all ranks of a case."""
        cost_s = _weighted(self.case, case_features(case))
        return cost_s if expected_refusal(case) is None else cost_s * _REFUSED_SHARE

    def price(self, case: Case) -> Price:
        """The `Price` of a case: its own CPU seconds, and those of its witnesses by name."""
        if expected_refusal(case) is not None:
            return Price(own_s=self.case_s(case))
        witness, relation = solo_case(case), partner(case)
        shared = {f"solo {case_id(witness)}": _weighted(self.solo, solo_features(witness))}
        if relation is not None:
            shared[f"partner {case_id(relation.partner)}"] = self.case_s(relation.partner)
        return Price(own_s=self.case_s(case), shared_s=shared)


def costs_path(root: Path) -> Path:
    """Where the costs of a project are stored."""
    return root / "golden" / "evidence" / "costs.json"


def read_costs(root: Path) -> Costs:
    """The costs of a project, else those that the harness measured. Raises `CostsDamaged`."""
    path, fix = costs_path(root), f"restore it, or run `{fit_costs()}`."
    if not path.exists():
        path = costs_path(own_root())
    try:
        return read_sealed(path, Costs, schema=SCHEMA, damaged=CostsDamaged, fix=fix)
    except OSError as error:
        raise CostsDamaged(f"cannot be read: {error.strerror}.", where=str(path), fix=fix) from error


def write_costs(root: Path, costs: Costs) -> Path:
    """Store the costs and return the path."""
    write_sealed(costs_path(root), costs)
    return costs_path(root)


def case_features(case: Case) -> dict[str, float]:
    """The features of a case that cost CPU seconds, each times the number of ranks that pay for it."""
    layers, traits = case.model.shape.layers, case.float8.traits
    wrapped = sum(case.checkpointing.wraps(layer) for layer in range(layers))
    fp8, tp, rows = case.float8.enabled, case.layout.tp > 1, case.float8.enabled and not traits.one_scale_per_tensor
    # Blocks of one kind share a graph; with some of them checkpointed there are two kinds.
    graphs = 0 if case.compile == "none" else 2 if 0 < wrapped < layers else 1
    recomputed = wrapped / layers * (0.5 if case.checkpointing.mode == "selective_op" else 1.0)
    eager_tp = tp and not graphs
    once = {
        "rank": 1.0,
        "graph": float(graphs),
        "graph float8": float(graphs * fp8),
        "graph rowwise": float(graphs * rows),
        "graph tp": float(graphs * tp),
        "graph tp float8": float(graphs * tp * fp8),
        "graph recompute": graphs * recomputed,
        "inductor": float(case.compile == "inductor"),
    }
    every_step = {
        "float8": float(fp8),
        "fsdp": float(case.uses_fsdp),
        "tp": float(eager_tp),
        "tp float8": float(eager_tp and fp8),
        "tp rowwise": float(eager_tp and rows),
        "tp output layer": float(tp and case.float8.output_layer),
        "recompute": recomputed,
        # A rank handles its own sequences; TP ranks handle the same ones each.
        "tokens": case.local_batch * case.train.seq_len / 256,
    }
    steps = case.train.steps
    per_rank = {**once, **{name: value * steps for name, value in every_step.items()}}
    return {name: value * case.world_size for name, value in per_rank.items()}


def solo_features(witness: Case) -> dict[str, float]:
    """What the CPU seconds of a solo witness are made of: it replays every data-parallel rank."""
    rows = witness.float8.enabled and not witness.float8.traits.one_scale_per_tensor
    replays = witness.layout.dp * witness.train.steps
    return {
        "run": 1.0,
        "replay": float(replays),
        "replay float8": float(replays * witness.float8.enabled),
        "replay rowwise": float(replays * rows),
        "tokens": replays * witness.local_batch * witness.train.seq_len / 256,
    }


def _weighted(weights: Mapping[str, float], features: Mapping[str, float]) -> float:
    return sum(weights.get(name, 0.0) * value for name, value in features.items())
