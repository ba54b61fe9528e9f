"""The expectations of one case: everything that a run of it must contain, behind one value.

Checks use this value for what depends on more than the case. Every step behind the second equals the second.
"""

import functools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from harness.expect import memory, model, relations, traffic
from harness.expect.memory import SavedLimits
from harness.expect.model import CastForm, CastSite, CompiledCasts, Model
from harness.expect.relations import Relation
from harness.matrix.case import Case
from harness.matrix.dims.dimension import Transfer
from harness.matrix.dims.pp import expert_layers_of, held
from harness.matrix.dims.tp import extra_matmul_calls
from harness.matrix.layout import coordinates, peers
from harness.matrix.numerics import VIRTUAL_DEVICE, Numerics, drifts, has_plain_shards, replayed_steps
from harness.matrix.rules import Refusal, expected_refusal
from harness.matrix.upstream import NONE, Changes
from harness.registry import is_llama
from harness.trace.counts import ExpertCall

# What one version does, by the names that `Finding.formula` and the record of verified versions use.
MATMULS, CASTS, TRAFFIC = "matmuls", "casts", "traffic"
SAVED_MEMORY, LIVE_MEMORY, FUSION = "saved memory", "live memory", "fusion"
FORMULAS = (MATMULS, CASTS, TRAFFIC, SAVED_MEMORY, LIVE_MEMORY, FUSION)


class Expectations:
    """What a run of one case must contain.

    `linears`: of a model that is not a Llama; None before its single-rank reference has run. `numerics`: which bits the
    run promises. `changes`: what the versions of torch and torchao that it runs with do otherwise than the first that
    the formulas hold for.
    """

    def __init__(
        self, case: Case, linears: Model | None = None, *, numerics: Numerics = VIRTUAL_DEVICE, changes: Changes = NONE
    ) -> None:
        self.case = case
        self.changes = changes
        self.numerics = numerics
        # True if all that must be seen follows from the case; of any other model it is found out.
        self.has_formulas = is_llama(case.target)
        self.model = model.llama_model(case) if self.has_formulas else linears

    def of(self, rank: int) -> "Expectations":
        """Return what this rank must do: of its stages, where the case has a pipeline."""
        return self if self.case.layout.pp == 1 else self._of_stages[coordinates(self.case.layout, rank)["pp"]]

    @functools.cached_property
    def _of_stages(self) -> "Sequence[Expectations]":
        parts = []
        for rank in peers(self.case.layout, 0, ("pp",)):
            part = Expectations(self.case, numerics=self.numerics, changes=self.changes)
            part.model = self.linears.held(held(self.case, rank, self.linears.converted))
            parts.append(part)
        return parts

    @functools.cached_property
    def not_recorded(self) -> Mapping[str, str]:
        return not_recorded(self.case, self.numerics)

    @functools.cached_property
    def never_recorded(self) -> Collection[str]:
        """Return those of `not_recorded` that no rank is asked for. The size of a model not known shows in the run."""
        tried = {"module_tensors"} if replayed_steps(self.case, self.numerics) else set()
        return self.not_recorded.keys() - tried

    @functools.cached_property
    def refusal(self) -> Refusal | None:
        """Return the error that the case must end in; None when it must train."""
        return expected_refusal(self.case)

    @property
    def linears(self) -> Model:
        """Return the linears of the model. Checks that need them are not checked before they are known."""
        assert self.model is not None, "checks of linears need the model"
        return self.model

    @functools.cached_property
    def converted_fqns(self) -> tuple[str, ...]:
        """Return the linears that must be Float8Linear after conversion, sorted."""
        return self.linears.converted

    @functools.cached_property
    def compiled_casts(self) -> CompiledCasts | None:
        """Return the casts of compiled blocks in one step; None if the blocks are not known, and in an eager case."""
        if not self.has_formulas or self.case.compile == "none":
            return None
        inside = [fqn for fqn in self.converted_fqns if fqn.startswith("layers.")]
        return model.compiled_casts(self.case, inside, self.changes)

    @functools.cached_property
    def scaled_mm_calls(self) -> tuple[int, int]:
        """Return the range of scaled matmuls of one rank in one step; every chunk of a fused matmul counts."""
        once = model.calls_of_linears(self.case, self.linears)
        if self.has_formulas:
            once += extra_matmul_calls(self.case, scaled=True)
        fewest, most = self.recomputed_calls
        return once + fewest, once + most

    @functools.cached_property
    def recomputed_calls(self) -> tuple[int, int]:
        """Return the range of scaled matmuls that checkpointing recomputes in one rank and one step."""
        if self.has_formulas:
            return (model.recomputed_calls(self.case, self.linears),) * 2
        return model.recomputed_matmuls(self.case, self.linears)

    @functools.cached_property
    def casts(self) -> Mapping[CastSite, tuple[CastForm, ...]]:
        """Return the casts to float8 of one rank in one step: their forms by site, in execution order."""
        return model.expected_casts(self.case, self.linears)

    @functools.cached_property
    def cast_calls(self) -> int:
        """Return the casts to float8 by the linears of one rank in one step, without those of FSDP2."""
        return sum(len(forms) for site, forms in self.casts.items() if site.phase not in model.OF_GATHERS)

    def transfers(self, *, step: int, rank: int, calls: Iterable[ExpertCall] = ()) -> tuple[Transfer, ...]:
        """Return the collectives of `rank` in `step` (1-based). `calls`: of its experts, which decide what returns."""
        return traffic.sent(self.case, rank, step, self.changes, calls)

    def saved_bytes(self, *, step: int, rank: int, calls: Iterable[ExpertCall] = ()) -> dict[str, int]:
        """Return the bytes by dtype that `rank` saves for the backward pass of `step`, where `saves_exactly`.

        `calls`: of its experts in this step, whose rows may be saved. Of these the first forwards are weighed.
        """
        rows_by_fqn = defaultdict[str, list[int]](list)
        for call in calls:
            if call.phase == "forward":
                rows_by_fqn[call.fqn].append(sum(call.local_counts))
        rows = tuple(map(tuple, rows_by_fqn.values()))
        if memory.depends_on_tokens(self.case) and not rows:
            rows = ((0,) * self.case.train.accumulation,) * len(expert_layers_of(self.case, rank))
        return memory.expected_saved(self.case, step=min(step, 2), rank=rank, changes=self.changes, rows=rows)

    @functools.cached_property
    def saves_exactly(self) -> bool:
        """False where the partitioner chooses what a compiled block saves: there are limits only."""
        return memory.is_exact(self.case)

    def saved_limits(self, *, step: int, rank: int) -> SavedLimits:
        """Return the fewest and most bytes that `rank` saves for the backward pass of `step`. Compiled cases only."""
        return memory.saved_limits(self.case, step=min(step, 2), rank=rank, changes=self.changes)

    @functools.cached_property
    def stands_for_modules(self) -> bool:
        """True if the per-module replay checks the counterpart, which must equal this compiled case bit for bit."""
        return relations.stands_for_modules(self.case, self.relation, self.numerics)

    @functools.cached_property
    def relation(self) -> Relation | None:
        """Return the counterpart of the case and how closely they must match, or None."""
        return relations.partner(self.case, self.numerics)


def not_recorded(case: Case, numerics: Numerics = VIRTUAL_DEVICE) -> Mapping[str, str]:
    """Return the fields of `RankTrace` that stay empty in runs of this case, or may, each with the reason."""
    empty: dict[str, str] = {}
    if case.compile == "none":
        empty["graphs"] = "nothing is compiled"
    else:
        empty["operands"] = "compiled blocks bypass the probe; graph_scales checks their casts"
    if not case.model.experts:
        empty["experts"] = "no block has experts"
    if not replayed_steps(case, numerics) or not is_llama(case.target):
        empty["module_tensors"] = _not_replayed(case, numerics)
    return empty


def _not_replayed(case: Case, numerics: Numerics) -> str:
    if case.compile != "none" and case.train.dtype != "float64":
        return "hooks would change compilation, and the case has no eager counterpart to compare with"
    if drifts(case, numerics) and has_plain_shards(case):
        return (
            f"{case.target} computes with plain tensors, which do not tell which part of a module's tensor a rank has"
        )
    if drifts(case, numerics) and case.float8.tp_styles == "float8" and not is_llama(case.target):
        return "which module casts an input is the choice of the float8 TP styles"
    if drifts(case, numerics):
        return "the modules of one step are more than a replay can be given"
    return "parity is exact in this layout and dtype"
