"""The mutation matrix of some faults, each in the first of its host cases, and what every part of the matrix must show.

Slow for a test (every fault is a run on real ranks), and the reason to trust all others. Host cases take as few steps
here as a fault needs; `fp8-harness dev mutate` plants every fault in host cases of five, and records which rules they
break. Every run of the tests breaks each of these rules again, with as few faults as that takes, so that no check loses
its teeth unseen; the sweeps plant all faults.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.matrix.recipes import TRAITS
from harness.plugins.faults.faults import Fault, all_faults, host_kind
from harness.plugins.faults.kills import Kills, read_kills
from harness.plugins.faults.mutation import MutationMatrix, hosts_among, run_mutations
from harness.project import find_project
from harness.running.executor import Executor
from harness.running.plan import make_plan
from harness.running.progress import SilentProgress
from harness.running.selection import Query


def first_host(fault: Fault) -> Case:
    return fault.hosts(at_most=1)[0]


def planted_in(kind: Callable[[Case], bool]) -> tuple[str, ...]:
    """The names of the faults whose first host case is of this kind."""
    return tuple(name for name, fault in all_faults().items() if kind(first_host(fault)))


# Compiled blocks take ten times as long as eager ones.
_IN_COMPILED = planted_in(lambda host: host.compile != "none")
EAGER = tuple(fault for fault in all_faults().values() if fault.name not in _IN_COMPILED)
COMPILED = tuple(fault for fault in all_faults().values() if fault.name in _IN_COMPILED)

# Those of what only the reference target has.
OF_THE_REFERENCE = {
    "async TP": "symmetric_memory_not_enabled fusion_pass_off scatters_not_recognized operand_taken_before_its_reshape "
    "scatter_dim_of_the_flat_operand output_shape_forgotten scattered_dim_not_moved_back scatter_averages "
    "row_scales_of_the_first_chunk gathered_chunks_swapped produced_chunks_swapped",
    "tied ends, the axis": "ends_untied_before_sharding gradient_of_tied_embedding_lost",
    "bias, the axis": "bias_lost_in_conversion bias_added_by_every_tp_rank bias_gradient_divided_by_tp "
    "bias_gradient_of_own_positions",
    "evaluation": "weight_rounded_by_evaluation old_weight_in_evaluation precomputed_scale_stale_in_evaluation "
    "evaluation_mode_left_on weights_left_gathered_by_evaluation evaluation_loss_of_one_rank_off",
    "resuming": "optimizer_state_not_loaded optimizer_step_count_lost moments_rounded_by_checkpoint "
    "learning_rate_lost_by_load weight_of_one_rank_not_loaded resharded_rows_in_another_order "
    "nothing_precomputed_after_load precomputed_scale_stale_after_load float8_weights_not_safe_to_load",
    "SGD": "momentum_lost momentum_of_another_weight weight_decay_decoupled momentum_in_bfloat16_on_one_rank",
    "Muon": " ".join(planted_in(lambda host: host.train.optimizer == "muon")),
    "casts": "config_of_grad_output_ignored granularities_swapped",
    "parameters in bfloat16": "parameters_kept_in_float32 gradients_a_little_too_large",
    "MXFP8": " ".join(planted_in(lambda host: TRAITS[host.float8.recipe].block)),
    "experts": " ".join(planted_in(lambda host: host.model.experts > 0)),
    "pipelines": " ".join(planted_in(lambda host: host.layout.pp > 1)),
    "context parallelism": " ".join(planted_in(lambda host: host.layout.cp > 1)),
    "packed documents": " ".join(planted_in(lambda host: host.train.packing != "none")),
}
# Its one host case has a recorded fault, and runs twice as often: planted in `test_known.py`, where that host case is.
IN_A_KNOWN_CASE = ("weight_amax_over_world",)

# The rules of checks that look at one record, each with the faults that it is there for.
BROKEN_BY = {
    "scales/amax": "scale_in_float32 precomputed_scale_one_step_late scale_of_one_block_doubled "
    "scale_of_one_block_halved",
    "scales/data": "weight_data_stale gathered_shard_of_one_rank_stale row_scales_of_another_rank",
    "scales/different-per-rank": "amax_not_reduced_over_tp weight_amax_over_replicas",
    "scales/local-tensor": "gathered_input_has_local_scale",
    "scales/matmul-scales": "block_scales_not_swizzled block_scales_swizzled_twice",
    "scales/number": "one_rank_leaves_a_linear_out",
    "scales/power-of-two": "power_of_two_lost",
    "scales/shared": "amax_reduced_over_dp",
    "scales/target-dtype": "gradient_cast_to_e4m3",
    "lifetime/cast": "weight_never_updated",
    "lifetime/copy": "cast_from_copy_of_first_step",
    "lifetime/scale": "precomputed_scale_one_step_late",
    "lifetime/other-scale": "scale_buffer_shared_by_inputs",
    "lifetime/microbatch": "input_cast_of_first_microbatch",
    "lifetime/gathered": "weights_stay_gathered_behind_step",
    "recompute/cast": "recompute_scale_changed recompute_rounds_block_scales_down",
    "traffic/amax-elsewhere": "weight_amax_over_replicas",
    "traffic/amax-missing": "amax_not_reduced_over_tp weight_amax_not_reduced_over_shards",
    "traffic/gathers": "weights_kept_after_forward weights_freed_after_forward",
    "traffic/high-precision": "fp8_all_gather_subclass_dropped",
    "traffic/instead": "replicas_reduced_over_shards",
    "traffic/reduce-dtype": "gradients_reduced_in_another_dtype",
    "traffic/volume": "norm_gradients_not_reduced gradients_reduced_after_every_microbatch",
    "memory/other-checkpointing": "checkpointing_lost",
    "memory/float8-outlives-forward": "float8_weight_kept_for_backward",
    "memory/bytes": "abs_saved_for_backward",
    "routing/top-k": "second_choice_is_the_first",
    "routing/weights": "chosen_weights_not_made_to_add_up",
    "routing/counts": "counts_of_another_expert",
    "routing/sent": "weights_applied_before_and_after",
    "routing/arrived": "tokens_arrive_in_another_order chunks_of_ranks_swapped token_dropped",
    "routing/returned": "results_come_back_in_another_order results_sent_back_by_expert",
    "routing/gradient-of-tokens": "gradients_of_tokens_in_another_order",
    "routing/gradient-of-results": "gradients_of_results_in_another_order",
    "routing/router": "router_computes_in_bfloat16 choice_of_another_token",
    "routing/experts": "group_ends_off_by_one experts_of_one_rank_permuted",
    "routing/bias": "bias_moves_to_the_busy bias_moved_twice",
    "parity/gradients": "amax_not_reduced_over_tp gradients_divided_by_world same_batch_on_every_dp_rank "
    "weight_amax_not_reduced_over_shards norm_gradients_not_reduced mean_of_means_of_ranks",
    "packing/loss": "document_mask_lost labels_of_padding_counted",
    "packing/grad-norm": "document_mask_lost",
    "divergence/count": "loss_over_local_tokens",
    "divergence/loss": "last_token_dropped_on_last_rank",
    "divergence/operand": "same_batch_on_every_dp_rank",
}

# What distinguishes a host case.
Part = Literal["one rank", "training loop", "TP", "FSDP2 and HSDP", "experts", "pipelines", "context"]

_FEWEST_STEPS = 2  # what the first update did is seen in the second step
# Memory that grows, numbers that get too large, and a loss that stands still take more steps than that.
_SHOWN_LATE = ("leaks/", "finite/", "scales/nonfinite", "routing/weights", "loss_vs_golden/frozen")
_PRECOMPUTED_STEPS = 3  # the first scales are precomputed after the first update, stale ones are of the second


@functools.cache
def short_host(fault: Fault) -> Case:
    """The first host case of a fault, with as few steps as let it show."""
    host = first_host(fault)
    fewest = _PRECOMPUTED_STEPS if host.float8.precompute_scale else _FEWEST_STEPS
    train = msgspec.structs.replace(host.train, steps=max(fewest, fault.since_step))
    return msgspec.structs.replace(host, train=train)


def part_of(fault: Fault) -> Part:
    """Where the first host case of a fault belongs; a training loop does more than one batch and one update a step."""
    host = first_host(fault)
    kind, train = host_kind(host), host.train
    if host.model.experts:
        return "experts"
    if host.layout.pp > 1:
        return "pipelines"
    if host.layout.cp > 1:
        return "context"
    if kind.layout == "one rank":
        return "one rank"
    looped = train.evaluate or train.resume != "none" or train.accumulation > 1
    if looped or train.max_norm is not None or train.ignored_tokens != "none":
        return "training loop"
    return "TP" if kind.layout == "TP" else "FSDP2 and HSDP"


def faults_of(part: Part) -> tuple[Fault, ...]:
    """The eager faults of a part, without those that are planted in a known case."""
    return tuple(fault for fault in EAGER if part_of(fault) == part and fault.name not in IN_A_KNOWN_CASE)


class Aim(NamedTuple):
    """Why a fault is planted in every run: what it is the first to break, in which host case."""

    host: Case
    rules: frozenset[str]


@functools.cache
def aims() -> Mapping[Fault, Aim]:
    """As few eager faults as break every rule that they are recorded with.

    Every class of faults is among them, and those that nothing is recorded of yet. A fault in a host case that is used
    anyway is cheaper. Faults without an effect are for the sweeps.
    """
    faults = [fault for fault in EAGER if fault.equivalent is None and fault.name not in IN_A_KNOWN_CASE]
    chosen = {fault: Aim(short_host(fault), frozenset()) for fault in faults if not recorded_rules(fault)}
    hosts = {aim.host for aim in chosen.values()}
    goals = {fault: _goals(fault) for fault in faults if fault not in chosen}
    left = set[str]().union(*goals.values())
    while left:
        best = max(goals, key=lambda fault: (len(goals[fault] & left), short_host(fault) in hosts))
        rules = frozenset(goals[best] & left & recorded_rules(best))
        late = any(rule.startswith(_SHOWN_LATE) for rule in rules)
        chosen[best] = Aim(best.hosts(at_most=1)[0] if late else short_host(best), rules)
        hosts.add(chosen[best].host)
        left -= goals[best]
    return chosen


def _goals(fault: Fault) -> set[str]:
    """What a fault may be planted for: its class and its rules."""
    return {f"class {fault.group}", *recorded_rules(fault)}


@functools.cache
def recorded_kills() -> Kills:
    recorded = read_kills(find_project().root)
    assert recorded is not None
    return recorded


@functools.cache
def recorded_rules(fault: Fault) -> frozenset[str]:
    """The rules that a fault broke in its first host case when the matrix was recorded."""
    host = first_host(fault)
    kill = recorded_kills().found.get(fault.name, {}).get(case_id(host))
    return frozenset() if kill is None else frozenset(kill.rules)


def short_matrix(faults: Sequence[Fault], executor: Executor | None = None) -> MutationMatrix:
    """These faults, each in its first host case with few steps, and these host cases clean."""
    return matrix_of({fault: short_host(fault) for fault in faults}, executor)


def matrix_of(hosts: Mapping[Fault, Case], executor: Executor | None = None) -> MutationMatrix:
    """These faults, each in its host case, and these host cases clean."""
    by_name = {fault.name: (host,) for fault, host in hosts.items()}
    plan = make_plan(device="cpu")
    return run_mutations(find_project(), tuple(hosts), by_name, plan, SilentProgress(), executor=executor)


def planted_matrix(faults: Sequence[Fault], query: Query | None = None, root: Path | None = None) -> MutationMatrix:
    """These faults, each in its first host case among the cases of a query, and the host cases clean."""
    project = find_project(root)
    hosts = hosts_among(project, faults, query or Query(), at_most=1)
    return run_mutations(project, faults, hosts, make_plan(device="cpu"), SilentProgress())


def assert_all_found(matrix: MutationMatrix) -> None:
    """Every fault that has an effect is found by a check, and no check fails in a clean run."""
    assert_found_in(matrix, not_reached=set(), not_planted=set())


def assert_found_in(matrix: MutationMatrix, *, not_reached: set[str], not_planted: set[str]) -> None:
    """Every fault but these, and those without an effect, is found by a check; no check fails in a clean run."""
    found = {trial.case_id: trial.message for trial in matrix.false_positives}
    assert found == {}, found
    missed = {trial.fault: trial.message for trial in matrix.undetected}
    assert not missed, missed
    why = {trial.fault: trial.not_reached for trial in matrix.not_reached}
    assert why.keys() == not_reached, why
    assert_named(matrix)
    assert matrix.not_planted.keys() == not_planted
    assert not matrix.interrupted


def assert_named(matrix: MutationMatrix) -> None:
    """No headline names less, or misleads, than in that case, or else in any case, when the matrix was recorded."""
    recorded, worse = recorded_kills().found, {}
    for trial in matrix.misnamed:
        cases = recorded.get(trial.fault or "", {})
        kills = [cases[trial.case_id]] if trial.case_id in cases else cases.values()
        if new := set(trial.misnamed or ()).difference(*(kill.misnamed or () for kill in kills)):
            worse[trial.name] = (new, trial.message)
    assert not worse, worse


def assert_rules(matrix: MutationMatrix) -> None:
    """Rules are broken by the faults that they are there for, see `BROKEN_BY`."""
    for trial in matrix.trials:
        assert {rule for rule, faults in BROKEN_BY.items() if trial.fault in faults.split()} <= set(trial.rules), trial


def assert_checks(matrix: MutationMatrix, checks: str) -> None:
    """Each of these checks finds some fault, and rules those of `BROKEN_BY`."""
    assert_rules(matrix)
    assert set(checks.split()) <= {check for trial in matrix.trials if trial.detected for check in trial.checks}
