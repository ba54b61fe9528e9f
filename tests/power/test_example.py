"""The mutation matrix of `examples/tiny_gpt`, a target whose model no formula describes: for every night."""

from pathlib import Path

import pytest

from harness.plugins.faults.faults import all_faults
from harness.plugins.faults.mutation import MutationMatrix
from harness.running.selection import Query
from tests.power.kills import OF_THE_REFERENCE, assert_found_in, planted_matrix

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_gpt"
# What the faults that are not planted change, and tiny_gpt does not have.
LACKS = {
    **OF_THE_REFERENCE,
    "sequence parallelism": "sequence_shards_swapped partial_output_not_reduced partial_output_averaged "
    "norm_gradients_not_reduced",
    "float8 TP styles": "gathered_input_has_local_scale fp8_tp_styles_lost cast_seen_as_high_precision "
    "last_update_lost_on_one_rank",
    "BF16 on one rank": "converted_unasked",
    "twelve steps": "partial_output_off_in_a_late_step decay_skipped_in_a_late_step",
    "padding": "padding_flag_lost padding_not_zeroed padding_on_one_operand_shifted padded_weight_rows_not_zeroed "
    "eps_lost",
    "selective checkpointing": "abs_saved_for_backward",
    "reshard_after_forward": "weights_freed_after_forward",
    "accumulation": "microbatches_summed gradients_zeroed_between_microbatches last_microbatch_not_reduced "
    "gradients_reduced_after_every_microbatch input_cast_of_first_microbatch",
    "cases with generated code": "generated_mean_leaves_out_the_end generated_gradients_off "
    "compiled_softmax_scale_off_on_one_rank",
    "ignored_tokens": "token_count_not_reduced mean_of_means_of_ranks mean_over_no_labels "
    "backward_skipped_without_labels",
    "clipping": "clip_factor_of_one_rank gradients_not_clipped clipped_by_norm_of_own_shards "
    "replicated_gradients_counted_by_every_rank",
    "a cut batch of the reference": "labels_read_as_inputs half_of_the_batch_trained",
    "the Llama of the cases": "alignment_rule_ignored query_scale_folded_into_weights rope_base_of_another_model "
    "padded_vocabulary_not_masked padded_vocabulary_masked_short last_bit_of_partials_lost gradient_of_logits_off",
}
NOT_PLANTED = set(" ".join(LACKS.values()).split())
# Its norm has no eps, and is not the RMSNorm of torch.
NOT_REACHED = {"norm_eps_too_large", "norm_eps_of_another_model", "recomputed_norm_without_epsilon"}
# Found by nothing but the recorded profiles: no rule that holds for any model forbids what these faults do.
ONLY_SIGNED = {
    "output_kept_on_module",
    "weights_kept_after_forward",
    "compiled_amax_sent_twice",
    "compiled_matmul_outputs_kept",
    "float8_weight_kept_for_backward",
}
# Besides by a rule.
SIGNED = {"precompute_dead_branch", "precompute_for_one_part"}


@pytest.fixture(scope="module")
def matrix() -> MutationMatrix:
    return planted_matrix(tuple(all_faults().values()), Query(sources=("all",)), EXAMPLE)


@pytest.mark.sweep  # 135 runs, 5 minutes on two cores
def test_every_fault_that_reaches_it_is_found_and_no_clean_run_fails(matrix: MutationMatrix) -> None:
    assert_found_in(matrix, not_reached=NOT_REACHED, not_planted=NOT_PLANTED)
    assert sum(trial.detected for trial in matrix.trials) >= 116


@pytest.mark.sweep
def test_what_no_formula_describes_is_found_by_its_profile(matrix: MutationMatrix) -> None:
    checks = {trial.fault: set(trial.checks) for trial in matrix.trials}
    assert {name for name, detecting in checks.items() if detecting == {"profile"}} == ONLY_SIGNED
    assert all({"profile", "traffic"} <= checks[name] for name in SIGNED)
