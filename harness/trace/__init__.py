"""The trace: what every rank of a run recorded, or how it failed, as plain numbers and strings without torch.

Written inside a rank (`worker/`), read by `checks/`. Every probe fills one optional field: None means that it was not
recorded, which is different from recorded and empty. One file per kind of record.
"""

from collections.abc import Mapping

import msgspec

from harness.trace.counts import ExpertCall, ExpertTrace, FlopsRecord, SavedMemory, TrafficRecord
from harness.trace.graphs import GraphTrace
from harness.trace.model import ModelRecord, ModuleDistance, ModuleShard, Resumed, StateChange, StepInputs, TensorSketch
from harness.trace.operands import CastShare, OperandTrace
from harness.trace.record import Record
from harness.trace.unshards import UnshardTrace


class StepTrace(Record, frozen=True, kw_only=True):
    """One optimizer step. `loss` is the token-weighted mean over the global batch, in nats, before the update."""

    step: int  # 1-based
    loss: float
    grad_norm: float  # global L2 norm over all gradients, as the optimizer gets them
    reported_grad_norm: float | None = None  # what the target itself reports, before clipping
    evaluation_loss: float | None = None  # as `loss`, of the evaluation before; None if the case has none
    scaled_mm_calls: int  # scaled matmuls executed by this rank: evaluation, forward, dgrad, wgrad and recompute
    optimizer_steps: int | None = None  # of the torch optimizer that took most; 0 where none took any
    seconds: float


class DocumentsAlone(Record, frozen=True, kw_only=True):
    """Step 1 with every document of packed sequences alone: loss, and gradient norm where a recipe promises it."""

    loss: float
    grad_norm: float | None = None


class RankTrace(Record, frozen=True, kw_only=True):
    rank: int
    steps: tuple[StepTrace, ...]
    converted_fqns: tuple[str, ...]  # linears that are Float8Linear after conversion, sorted
    unmatched_filters: tuple[str, ...]  # filter_fqns entries that matched no linear
    peak_memory_bytes: int  # CUDA: allocator peak; CPU: growth of the resident set of this rank
    data_digest: str  # sha256 of tokens and initial weights: equal for all layouts of a case family
    software: dict[str, str]  # torch, torchao, numpy, python
    device: str  # "cpu" or the CUDA device name
    architecture: str = ""  # of the device: "sm90", "gfx942"; empty on a CPU
    batch_digests: tuple[str, ...] = ()  # of the tokens of every data-parallel rank that this rank stands for
    virtual: tuple[str, ...]  # parts of the virtual FP8 device that were installed, sorted
    installed: tuple[str, ...] = ()  # all that the harness has put into torch for the life of this process, sorted
    arithmetic: str = ""  # "kernel" or "exact", as it was asked for; empty if the rank program does not know it
    model: ModelRecord | None = None
    inputs: tuple[StepInputs, ...] | None = None  # None if the model is not called as a whole, or compiled whole
    state: tuple[StateChange, ...] = ()
    not_recorded: Mapping[str, str] = {}  # what was asked for in vain, and why
    resumed: Resumed | None = None  # None if the case is not
    sketches: tuple[TensorSketch, ...] | None = None  # gradients and parameters
    operands: OperandTrace | None = None
    cast_shares: tuple[CastShare, ...] | None = None  # of a single-rank reference alone, instead of its operands
    documents_alone: DocumentsAlone | None = None  # of a single-rank reference of packed sequences alone
    unshards: UnshardTrace | None = None
    traffic: tuple[TrafficRecord, ...] | None = None
    saved_memory: tuple[SavedMemory, ...] | None = None
    graphs: GraphTrace | None = None
    flops: tuple[FlopsRecord, ...] | None = None
    experts: ExpertTrace | None = None
    logprobs: Mapping[int, bytes] | None = None  # of the labels of the last step, by sequence: float64, inf elsewhere
    module_tensors: tuple[ModuleShard, ...] | None = None
    module_distances: tuple[ModuleDistance, ...] | None = None  # of a replay alone
    draws: tuple["RankTrace", ...] | None = None  # the same run with random errors: of a noisy reference alone

    def expert_calls(self, step: int) -> tuple[ExpertCall, ...]:
        return tuple(call for call in self.experts.calls if call.step == step) if self.experts is not None else ()

    @property
    def without_records(self) -> "RankTrace":
        """Return the trace without the records that only checks need: small enough to store."""
        return msgspec.structs.replace(self, **dict.fromkeys(_RECORDS))


# Every one that may not have been recorded.
_RECORDS = tuple(field.name for field in msgspec.structs.fields(RankTrace) if field.default is None)


class RankFailure(Record, frozen=True, kw_only=True):
    """How a rank ended that did not finish: an exception, an exit, a signal, or stuck."""

    rank: int
    kind: str  # "raised", "exited", "signaled", "stuck", "stopped", "garbled" (its result cannot be read)
    message: str  # "RuntimeError: Expected both dimensions of mat2 ..." or "exit code 7" or "SIGSEGV"
    traceback: str  # Python traceback or faulthandler dump of all threads; may be empty
    phase: str  # what the rank reported it was doing: "build", "step 3", ...
    consequence: bool  # True if another rank failed first


class Run(Record, frozen=True, kw_only=True):
    """The outcome of one run of one case: a trace for every rank that finished, a failure for every other."""

    traces: tuple[RankTrace, ...]
    failures: tuple[RankFailure, ...]

    @property
    def by_rank(self) -> list[RankTrace]:
        """Return the traces sorted by rank, so that findings never depend on the order in which ranks returned."""
        return sorted(self.traces, key=lambda trace: trace.rank)

    @property
    def without_records(self) -> "Run":
        return msgspec.structs.replace(self, traces=tuple(trace.without_records for trace in self.traces))

    @property
    def causes(self) -> tuple[RankFailure, ...]:
        return tuple(
            sorted((failure for failure in self.failures if not failure.consequence), key=lambda failure: failure.rank)
        )

    @property
    def complete(self) -> bool:
        return bool(self.traces) and not self.failures
