"""What cases cost: CPU seconds by a model that was fitted to measured runs, stored in `golden/evidence/costs.json`.

A case costs its ranks times what its features add to a rank: converting, tensor parallelism, compiling. The model is
within a fifth of what was measured, over two orders of magnitude; it serves to choose and to budget cases that were
never run. How a tier is chosen is `matrix/choice.py`'s, how the numbers are fitted `studies/records.py`'s.

They were fitted to the tiny model. The estimate for a larger one is rough: its blocks cost what those of the tiny one
cost, and its matmuls take the time that the virtual device needs for them.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from harness.evidence.references import ALL_STORED, BF16, DRAWS, NOISE, PARTNER, Reference, Stored, needs
from harness.evidence.sealed import Sealed, holder, read_sealed
from harness.expect.expectations import Expectations
from harness.expect.memory import expected_saved
from harness.hints import fit_costs
from harness.matrix.case import Case, Checkpointing, Layout, Model
from harness.matrix.choice import Price
from harness.matrix.layout import SHARD_AXES, ranks_of
from harness.matrix.linears import FLOPS_PER_PARAMETER_AND_TOKEN, gemms, parameter_count
from harness.matrix.numerics import replayed_steps
from harness.matrix.recipes import ITEM_BYTES
from harness.matrix.rules import expected_refusal

_REFUSED_SHARE = 0.15  # a refused case ends in the first forward or backward pass

FLOPS_PER_CPU_S = 6e9  # of the virtual device, which multiplies in float64: measured with models of 15 to 30 million
RANK_BYTES = 250e6  # of its own process: what torch and a warmed-up rank keep besides tensors
# What a replay needs is a gradient and an update of every parameter in float32, of every step; copies of it are in the
# process that reads or writes it, and over all processes (measured with 30 million parameters, 2 steps).
_RECORDED_BYTES, _COPIES_IN_PROCESS, _COPIES = 8, 5, 12
_TRAININGS = DRAWS + 2  # of a noisy reference: without errors at the start and at the end
# Of a larger model each reference takes what the case takes; one in BF16 less: 3 for five (15 million parameters).
_SHARES = {BF16: 0.6, NOISE: 0.6 * _TRAININGS}


class Costs(Sealed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CPU seconds by feature, of the ranks of a case and of a single-rank reference, and what they were fitted to."""

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
        """Return the CPU seconds of all ranks of a case."""
        cost_s = _weighted(self.case, case_features(case))
        return cost_s if expected_refusal(case) is None else cost_s * _REFUSED_SHARE

    def price(self, case: Case, stored: Stored = ALL_STORED) -> Price:
        """Return the `Price` of a case: its own CPU seconds, and those of its references by name."""
        shared = {reference.name: self.reference_s(reference) for reference in _references(case, stored)}
        return Price(own_s=self.case_s(case), shared_s=shared)

    def reference_s(self, reference: Reference) -> float:
        """Return the CPU seconds of a reference, which computes the batch on one rank unless it is a counterpart."""
        if reference.role == PARTNER:
            return self.case_s(reference.case)
        features = solo_features(reference.case)
        if reference.role == NOISE:
            features = {name: value * (1 if name == "run" else _TRAININGS) for name, value in features.items()}
        return _weighted(self.solo, features)


def _references(case: Case, stored: Stored) -> tuple[Reference, ...]:
    expect = Expectations(case)
    return needs(expect, stored, recorded={"sketches", "module_tensors"} - {*expect.never_recorded})


def costs_path(root: Path) -> Path:
    return root / "golden" / "evidence" / "costs.json"


def read_costs(root: Path) -> Costs:
    """Return the costs of a project, else those that the harness measured. Raises `Missing` and `Damaged`."""
    return read_sealed(costs_path(holder(root, costs_path)), Costs, remake=f"run `{fit_costs()}`.")


def case_features(case: Case) -> dict[str, float]:
    """Return the features of a case that cost CPU seconds, each times the number of ranks that pay for it."""
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
    """Return what the CPU seconds of a single-rank reference are made of: it replays every data-parallel rank."""
    rows = witness.float8.enabled and not witness.float8.traits.one_scale_per_tensor
    replays = witness.layout.dp * witness.train.steps
    return {
        "run": 1.0,
        "replay": float(replays),
        "replay float8": float(replays * witness.float8.enabled),
        "replay rowwise": float(replays * rows),
        "tokens": replays * witness.local_batch * witness.train.seq_len / 256,
    }


def _dense_and_eager(case: Case) -> Case:
    """Return the case that keeps about as much: of experts it depends on the tokens."""
    dense = msgspec.structs.replace(case.model, experts=0)
    return msgspec.structs.replace(case, compile="none", model=dense)


def _weighted(weights: Mapping[str, float], features: Mapping[str, float]) -> float:
    return sum(weights.get(name, 0.0) * value for name, value in features.items())


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds of a case and of its references; bytes of the largest process, and of all at the same time.

    `rough`: the model is larger than the one that costs were fitted to.
    """

    case_cpu_s: float
    witness_cpu_s: float
    process_bytes: float
    all_bytes: float
    rough: bool
    references: tuple[str, ...]


def estimate(case: Case, costs: Costs, stored: Stored = ALL_STORED) -> Estimate:
    """Return what a case will need. A kept reference takes no time."""
    price = costs.price(case, stored)
    witness_s = sum(price.shared_s.values())
    more_s = _larger_s(case, costs)
    refused = expected_refusal(case) is not None
    recorded = _RECORDED_BYTES * parameter_count(case) * (0 if refused else len(replayed_steps(case)))
    rank, witness = _rank_bytes(case), _rank_bytes(_on_one_rank(case))
    return Estimate(
        case_cpu_s=price.own_s + more_s,
        witness_cpu_s=witness_s + more_s * sum(_SHARES.get(each.role, 1.0) for each in _references(case, stored)),
        process_bytes=max(rank, witness) + _COPIES_IN_PROCESS * recorded,
        all_bytes=max(rank * case.world_size, witness) + _COPIES * recorded,
        rough=more_s > 0,
        references=tuple(price.shared_s),
    )


def _larger_s(case: Case, costs: Costs) -> float:
    """Return the CPU seconds that a model takes beyond the tiny one with the same vocabulary; 0 for a smaller one."""
    tiny_model = Model(vocab_size=case.model.vocab_size, pad_vocab_to_multiple_of=case.model.pad_vocab_to_multiple_of)
    if parameter_count(case) <= parameter_count(tiny := Case(model=tiny_model)) or expected_refusal(case) is not None:
        return 0.0
    tokens = case.train.tokens * case.train.steps
    flops = FLOPS_PER_PARAMETER_AND_TOKEN * (parameter_count(case) - parameter_count(tiny)) * tokens
    more_layers = case.model.shape.layers / tiny.model.shape.layers - 1
    started_s = costs.case.get("rank", 0.0) * case.world_size
    return flops / FLOPS_PER_CPU_S + max(0.0, more_layers * (costs.case_s(case) - started_s))


def _on_one_rank(case: Case) -> Case:
    """Return the case as its reference runs it: one data-parallel rank after the other, each with the whole model."""
    train = msgspec.structs.replace(case.train, global_batch=case.local_batch)
    return msgspec.structs.replace(case, layout=Layout(), checkpointing=Checkpointing(), train=train)


def _rank_bytes(case: Case) -> float:
    share = parameter_count(case) / ranks_of(case.layout.mesh, SHARD_AXES)
    tensors = 2 + case.train.update.states  # parameter, gradient, and what the optimizer keeps
    state = share * tensors * ITEM_BYTES[case.parameter_dtype]
    saved = sum(expected_saved(_dense_and_eager(case), step=1, rank=0).values())
    operands = max((8 * (gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n) for gemm in gemms(case)), default=0)
    return RANK_BYTES + state + 2 * saved + operands
