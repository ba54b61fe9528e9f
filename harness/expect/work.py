"""What one rank multiplies in one step: its matmuls in the shapes that tensor parallelism leaves, and FLOPs by part.

Of the reference Llama, eager. A compiled step computes the same products; the pipelined operators of async TP multiply
a product in TP parts, which have the same FLOPs together. A multiplication and an addition are 2 FLOPs. Attention
counts as if it were not causal and sequences not packed, its backward as twice its forward; the flash kernel computes 5
products in backward where this counts 4.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

import msgspec
from msgspec.structs import replace

from harness.expect.model import is_multiplied_again
from harness.matrix import linears
from harness.matrix.case import Case
from harness.matrix.dims.pp import blocks_of, held
from harness.matrix.dims.tp import extra_matmul_calls
from harness.matrix.recipes import TRAITS, MatmulRole, RecipeTraits
from harness.result import Multiplied, multiplied_by
from harness.trace.counts import FLOAT8, multiplied_words

ALIGNMENT = 16  # of n and k, by `torch._scaled_mm`; MXFP8 asks for whole blocks
HIGH_PRECISION = TRAITS["bf16"]
_ROLES = get_args(MatmulRole)
BLOCKS, OUTPUT, ATTENTION, ROUTED = "linears of blocks", "output layer", "attention", "routers, experts"


class Gemm(linears.Gemm, frozen=True, kw_only=True):
    """One matmul [m, k] x [k, n] of a linear, as one rank executes it in one step.

    `precision`: "float8", or the dtype of both operands. `scales_rows`: it has scales for rows. `executed_k`: k as
    `pad_inner_dim` pads it. `multiple`: what n and k must be of. `copied`: that copies both operands. `count`: how
    often training needs it. `repeats`: how often it is executed besides, because checkpointing recomputes it or a step
    is evaluated. `groups`: of a grouped matmul, whose rows, m or k of wgrad, are those of so many experts.
    """

    precision: str
    scales_rows: bool
    executed_k: int
    multiple: int = ALIGNMENT
    copied: bool
    count: int
    repeats: int = 0
    groups: int = 1

    @property
    def linear(self) -> str:
        return linears.linear_name(self.fqn)

    @property
    def aligned(self) -> bool:
        """True if `torch._scaled_mm` takes it without padding, whether it is converted or not; m may be anything."""
        return self.n % self.multiple == 0 and self.k % self.multiple == 0

    @property
    def refused(self) -> bool:
        """Return True if it is multiplied in float8 and `torch._scaled_mm` refuses its sizes."""
        return self.precision == FLOAT8 and bool(self.n % self.multiple or self.executed_k % self.multiple)

    @property
    def flops(self) -> int:
        """Of what training needs, without padding and repeats: 2 m n k each."""
        return 2 * self.m * self.n * self.k * self.count

    @property
    def executions(self) -> int:
        return self.count + self.repeats

    @property
    def executed_flops(self) -> int:
        return 2 * self.m * self.n * self.executed_k * self.executions

    @property
    def padding_bytes(self) -> int:
        """Return what `pad_inner_dim` reads and writes for all executions: both float8 operands."""
        return (self.m + self.n) * (self.k + self.executed_k) * self.executions if self.copied else 0


def gemms(case: Case, *, rank: int = 0) -> tuple[Gemm, ...]:
    """Return the matmuls of linears, and of experts whose tokens are spread evenly, in order of execution."""
    of_module = {fqn: alike.gemms for alike in alike_modules(case, rank=rank) for fqn in alike.fqns}
    modules = (module.fqn for module in _modules(case, rank))
    return linears.in_order([[replace(gemm, fqn=fqn) for gemm in of_module[fqn]] for fqn in modules])


class Alike(NamedTuple):
    """Modules of one part with the same matmuls, `gemms` of the first: all blocks have the same few sizes."""

    fqns: tuple[str, ...]
    gemms: tuple[Gemm, ...]


@functools.lru_cache(maxsize=1024)
def alike_modules(case: Case, *, rank: int = 0) -> tuple[Alike, ...]:
    """Return all modules that multiply, in the order of the first of each kind."""
    kinds: dict[tuple[object, ...], list[_Module]] = {}
    for module in _modules(case, rank):
        kind = (
            module.rows,
            module.features,
            id(module.traits),
            module.repeats,
            module.pads,
            module.groups,
            _part_of(module.fqn),
        )
        kinds.setdefault(kind, []).append(module)
    return tuple(Alike(tuple(member.fqn for member in kind), _gemms_of(case, kind[0])) for kind in kinds.values())


class _Module(NamedTuple):
    """What multiplies so many rows by weights of these local (in_features, out_features)."""

    fqn: str
    rows: int
    features: tuple[int, int]
    traits: RecipeTraits
    repeats: int
    pads: bool = False
    groups: int = 1


def _modules(case: Case, rank: int) -> Iterator[_Module]:
    pads, rows = case.float8.pad_inner_dim, case.tokens_per_rank
    for fqn in held(case, rank, linears.linear_fqns(case)):
        yield from _routed(case, fqn)
        traits = case.float8.traits if linears.is_converted(case, fqn) else HIGH_PRECISION
        features = linears.local_features(case, linears.linear_name(fqn), rank)
        yield _Module(fqn, rows, features, traits, _repeats(case, fqn), pads=pads)


def _routed(case: Case, fqn: str) -> Iterator[_Module]:
    """Yield the router and the experts of a block, which come before its shared expert, `fqn`."""
    block, _, name = fqn.rpartition(".moe.shared_experts.")
    if not block or name != "w1":
        return
    model, traits = case.model, case.float8.grouped_traits
    again = case.train.accumulation * (int(case.train.evaluate) + linears.is_checkpointed(case, fqn))
    yield _Module(
        f"{block}.{linears.ROUTER}", case.residual_tokens, (model.shape.dim, model.experts), HIGH_PRECISION, again
    )
    up, local = (model.shape.dim, model.expert_dim), case.local_experts
    for weight, features in (("w1", up), ("w3", up), ("w2", up[::-1])):
        yield _Module(f"{block}.{linears.EXPERTS}.{weight}", case.sent_rows, features, traits, again, groups=local)


def _gemms_of(case: Case, module: _Module) -> tuple[Gemm, ...]:
    matmuls = []
    for role, (m, n, k) in linears.matmul_sizes(module.rows, module.features).items():
        float8 = module.traits.multiplies(role)
        pads = float8 and module.pads
        gemm = Gemm(
            fqn=module.fqn,
            role=role,
            m=m,
            n=n,
            k=k,
            precision=FLOAT8 if float8 else case.train.dtype,
            scales_rows=float8 and module.traits.scales_rows(role),
            executed_k=-(-k // ALIGNMENT) * ALIGNMENT if pads else k,
            multiple=case.float8.traits.multiple,
            # A compiled block copies what it pads. In an eager one `torch.nn.functional.pad` copies what is aligned too
            copied=pads and (k % ALIGNMENT != 0 or case.compile == "none"),
            count=case.train.accumulation,
            repeats=module.repeats if role == "forward" else 0,
            groups=module.groups,
        )
        matmuls.append(gemm)
    return tuple(matmuls)


def _repeats(case: Case, fqn: str) -> int:
    again = int(case.train.evaluate)
    if fqn != linears.OUTPUT_FQN:
        _, layer, name = fqn.split(".", 2)
        again += is_multiplied_again(case, int(layer), name)
    return case.train.accumulation * again


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs of one rank and step: `flops` that training needs, and all that is executed, with repeats and padding."""

    part: str  # BLOCKS, OUTPUT, ATTENTION, ROUTED
    role: str  # "forward", "dgrad", "wgrad"; "backward" of attention
    precision: str  # "float8", or a dtype
    flops: int
    executions: int  # of matmuls, or of the attention of a block
    executed_flops: int


def work(case: Case, *, rank: int = 0, saves_attention: bool = True) -> tuple[Work, ...]:
    """Return what one rank multiplies in one step, by part, role and precision.

    `saves_attention`: `selective_op` saves the output of attention, which is so for every kernel but the CPU's.
    """
    by_part: dict[tuple[str, str, str], list[tuple[Gemm, int]]] = {}
    counted = [(gemm, len(kind.fqns)) for kind in alike_modules(case, rank=rank) for gemm in kind.gemms]
    for gemm, times in sorted(
        counted, key=lambda pair: (pair[0].fqn == linears.OUTPUT_FQN, _ROLES.index(pair[0].role))
    ):
        by_part.setdefault((_part_of(gemm.fqn), gemm.role, gemm.precision), []).append((gemm, times))
    of_linears = (
        Work(
            part=part,
            role=role,
            precision=precision,
            flops=sum(times * gemm.flops for gemm, times in of_part),
            executions=sum(times * gemm.executions for gemm, times in of_part),
            executed_flops=sum(times * gemm.executed_flops for gemm, times in of_part),
        )
        for (part, role, precision), of_part in by_part.items()
    )
    return (*of_linears, *_attention(case, blocks_of(case, rank), saves_attention=saves_attention))


def _part_of(fqn: str) -> str:
    if fqn == linears.OUTPUT_FQN:
        return OUTPUT
    return ROUTED if linears.linear_name(fqn).startswith((linears.ROUTER, linears.EXPERTS)) else BLOCKS


def _attention(case: Case, blocks: Sequence[int], *, saves_attention: bool) -> Iterator[Work]:
    """Forward multiplies queries by keys and weights by values: 2 x 2 seq^2 head_dim for every head and sequence.

    With context parallelism a rank has its part of the queries.
    """
    train, shape = case.train, case.model.shape
    heads = shape.heads // case.layout.tp
    once = 4 * case.local_seq_len * train.seq_len * shape.head_dim * heads * case.microbatch
    kept = case.checkpointing.mode == "selective_op" and saves_attention
    recomputed = 0 if kept else sum(map(case.checkpointing.wraps, blocks))
    needed = len(blocks) * train.accumulation
    forwards = needed + (recomputed + len(blocks) * train.evaluate) * train.accumulation
    for role, products, executions in (("forward", once, forwards), ("backward", 2 * once, needed)):
        yield Work(
            part=ATTENTION,
            role=role,
            precision=train.dtype,
            flops=products * needed,
            executions=executions,
            executed_flops=products * executions,
        )


def orthogonalized(case: Case, *, rank: int) -> Iterator[tuple[int, int, int]]:
    """Yield (m, n, k) of the products in bfloat16 of torch's Muon, which a rank computes of whole matrices.

    Each of five rounds multiplies a matrix by its transpose, the result by itself, and that by the matrix.
    """
    for fqn in held(case, rank, linears.linear_fqns(case)) if case.train.optimizer == "muon" else ():
        if fqn != linears.OUTPUT_FQN:
            short, long = sorted(linears.linear_features(case, linears.linear_name(fqn)))
            yield from [(short, short, long), (short, short, short), (short, long, short)] * 5


def executed(case: Case, *, rank: int, saves_attention: bool = True) -> Mapping[str, Multiplied]:
    """Return what one rank executes in one step, by part and precision, as `FlopsRecord` counts it."""
    products = [
        ("attention" if entry.part == ATTENTION else "matmuls", entry.precision, entry.executions, entry.executed_flops)
        for entry in work(case, rank=rank, saves_attention=saves_attention)
    ]
    for precision, scaled in ((FLOAT8, True), (case.train.dtype, False)):
        products.append(("matmuls", precision, extra_matmul_calls(case, scaled=scaled), 0))
    products += [("matmuls", "bfloat16", 1, 2 * m * n * k) for m, n, k in orthogonalized(case, rank=rank)]
    added = multiplied_by(
        (multiplied_words(part=part, precision=precision), calls, flops) for part, precision, calls, flops in products
    )
    return {words: multiplied for words, multiplied in added.items() if multiplied.calls}
