"""What reports nobody tuned to taught, in other words: what is refused, asked, left unread, and read from machines."""

from __future__ import annotations

import datetime

import pytest

from harness.bugs.importing import ImportedBug, import_configuration
from harness.bugs.report import read_report
from harness.errors import HarnessError
from tests.unit.bugs.test_reports import head, imported

MOE = "a mixture of experts"


def report(text: str, title: str = "", *, repository: str = "pytorch/ao", day: str = "2025-06-01") -> ImportedBug:
    return imported(head(repository, 1, day, title or "a crash") + text)


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ('--fsdp "full_shard auto_wrap"', "FSDP1"),
        ("--fp8-recipe tensorwise", "TransformerEngine"),
        ("--model_name openai/gpt-oss-20b", MOE),
        ("--first-last-layers-bf16.", "TransformerEngine"),
        ("--zero_1", "ZeRO"),
    ],
)
def test_options_refuse_by_name(flags: str, name: str) -> None:
    assert name in report(f"```\ntorchrun train.py {flags}\n```").bug.refused


@pytest.mark.parametrize(
    ("repository", "text", "name"),
    [
        ("pytorch/ao", "```python\nquantize_(vae, float8_dynamic_activation_float8_weight())\n```", "inference"),
        ("pytorch/ao", "```python\nquantize_(model, Float8WeightOnlyConfig())\n```", "inference"),
        ("neuralmagic/AutoFP8", "The output has another shape on H100.", "inference"),
        ("pytorch/ao", "```python\njitted = thunder.jit(convert_to_float8_training(m))\n```", "another compiler"),
    ],
)
def test_code_that_no_case_trains_is_refused(repository: str, text: str, name: str) -> None:
    assert name in report(text, "fp8 gemm fails", repository=repository).bug.refused


def test_the_folder_of_a_configuration_names_its_model() -> None:
    bug = report("```\nCONFIG_FILE=./models/llama4/train_configs/debug_model.toml ./run_train.sh\n```").bug
    assert MOE in bug.refused


def test_a_degree_that_is_not_understood_is_told() -> None:
    imported_bug = report("```\ntorchrun --nproc_per_node=8 train.py --zz_degree 2 --logdir x\n```")
    assert [line for line in imported_bug.ignored if "not understood" in line] == ["--zz_degree 2: not understood"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("The gap grows where blocks with Transformer Engine linears meet plain ones.", {"TransformerEngine"}),
        ("Weights of norms and of MoE routers are reduced in bf16.", {MOE}),
        ("Compile breaks if the layer (the delayed scaling one) is in a Sequential.", {"delayed scaling"}),
        ("`sync_float8_amax_and_scale_history` does not know these classes.", {"delayed scaling"}),
        ("It does not fail without MoE, nor with PP=1.", set()),
        ("It trains with context parallelism and `pp_size=1`.", {"context parallelism"}),
        ("Unlike DDP, nothing is replicated.", set()),
    ],
)
def test_what_a_sentence_mentions_is_a_question(text: str, names: set[str]) -> None:
    bug = report(f"FSDP=2\n{text}").bug
    assert (
        bug.refused == {} and {name for name, words in bug.missing.items() if words.startswith("was it run")} == names
    )


@pytest.mark.parametrize(
    ("title", "text", "question", "way"),
    [
        ("a question about PP", "FSDP=2", "pipeline parallelism", "write pp, schedule and accumulation"),
        ("a crash", "We train a MoE with MXFP8.", MOE, "write experts, top_k and ep"),
        ("FSDP + CP + PP", "", "context parallelism", "write cp and sequence_order"),
        ("norms differ under HSDP", "It takes 8 GPUs.", "dp_replicate", "how many replicas? 2 until you say"),
    ],
)
def test_what_the_reference_has_of_its_own_is_asked_for(title: str, text: str, question: str, way: str) -> None:
    bug = report(text, title).bug
    assert bug.refused == {} and bug.case is not None and way in bug.missing[question]


def test_what_a_degree_answers_is_not_asked() -> None:
    bug = report("FSDP2 + PP2", "PP-related issues").bug
    assert bug.stated["pp"] and "pipeline parallelism" not in bug.missing


def test_the_link_names_the_repository_that_a_pasted_text_does_not() -> None:
    text, link = (
        "# fp8 amax of another group\n\nIt diverges with TP=8.",
        "https://github.com/NVIDIA/Megatron-LM/pull/1",
    )
    assert "TransformerEngine" in imported(text, link=link).bug.refused
    assert not imported(text, link=link.replace("NVIDIA/Megatron-LM", "pytorch/ao")).bug.refused


@pytest.mark.parametrize("before", ["", "# a crash\n", "pytorch/ao · issue #1 · open\n# a crash\nlabels: bug\n"])
def test_whoever_posts_first_is_the_reporter(before: str) -> None:
    posts = "one · comment · 2025-06-01\n--tensor_parallel_degree 2\n\ntwo · comment · 2025-06-02\n--compile.enable\n"
    stated = imported(f"{before}{posts}", id="x").bug.stated
    assert "tp" in stated and "compile" not in stated
    answered = imported(f"# a crash\nIt fails with FSDP=2.\n{posts}", id="x").bug
    assert "tp" not in answered.stated and "dp_shard" in answered.stated


@pytest.mark.parametrize(
    "text",
    [
        "I have a similar issue with fsdp2 enabled.",
        "```python\nfrom torch.distributed.fsdp import fully_shard\nfrom torchao.float8 import Float8LinearConfig\n```",
    ],
)
def test_fsdp2_without_a_degree_is_asked_for_one(text: str) -> None:
    assert "how many FSDP2 ranks?" in report(text).bug.missing["dp_shard"]


@pytest.mark.parametrize(
    "text", ["[rank0]: torch._dynamo.exc.TorchRuntimeError: it failed", "compile: true\ntp_size: 2"]
)
def test_what_was_compiled_says_so(text: str) -> None:
    assert report(f"```\n{text}\n```").bug.stated["compile"]


@pytest.mark.parametrize("text", ["- `out_proj`: rowwise", "w1 is colwise/rowwise", "row-wise parallel styles"])
def test_the_plan_of_a_linear_is_no_recipe(text: str) -> None:
    assert "recipe" not in report(f"float8 with FSDP=2\n{text}").bug.stated


def test_a_class_in_the_title_refuses_by_name() -> None:
    assert "block-wise scaling" in report("FSDP=2", "tests for Float8BlockwiseLinear").bug.refused


def test_without_any_option_it_is_asked_what_was_run() -> None:
    assert set(report("Is float8 planned here?").bug.missing) == {"run"}


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("This follows what rowwise scaling does in other libraries today.", "recipe"),
        ("Every published Llama 3.1 70B configuration has this problem.", "dim"),
        ("It also reproduces at 2 GPUs.", "dp_shard"),
    ],
)
def test_a_word_alone_in_a_sentence_states_nothing(text: str, axis: str) -> None:
    bug = report(f"FSDP=4\n{text}").bug
    assert axis not in {*bug.stated} - {"dp_shard"} and axis not in {*bug.derived}


def test_a_word_beside_another_value_or_in_a_list_is_one() -> None:
    assert "recipe" in report("We see it at rowwise scaling with full AC in every run.").bug.stated
    assert "compile" in report("- torch.compile\n- FSDP=2").bug.stated


def test_what_only_some_commands_say_is_a_question() -> None:
    commands = [
        "NGPU=4 ./run_train.sh --compile.enable",
        "NGPU=4 ./run_train.sh --compile.enable --model.converters float8 --float8.enable_fsdp_float8_all_gather",
    ]
    text = "```\n" + "\n".join(commands) + "\n```"
    bug = report(text).bug
    assert "fp8_all_gather" in bug.missing["command"] and "fp8_all_gather" not in bug.stated
    assert bug.case is not None and bug.case.compile == "graph"
    with pytest.raises(HarnessError, match="several commands") as raised:
        import_configuration(read_report(text.encode(), where="a.md"), {}, today=datetime.date(2025, 6, 1))
    assert raised.value.fix == "keep one of them."


def test_null_and_minus_one_are_no_values() -> None:
    bug = report("```yaml\nfloat8_recipe: null\ntp_size: 2\nglobal_batch_size: -1\n```").bug
    assert "tp" in bug.stated and not {"recipe", "global_batch"} & {*bug.stated, *bug.missing}


LOG = """```
[rank0]:2025-01-31 10:12:50 - root - INFO - Swapped to Float8Linear layers with enable_fsdp_float8_all_gather=True
[rank0]:2025-01-31 10:12:50 - root - INFO - Model llama3 8B size: 8,030,261,248 total parameters
[rank0]:2025-01-31 10:12:50 - root - INFO - Applied full activation checkpointing to the model
[rank0]:2025-01-31 10:12:50 - root - INFO - Training starts at step 1, with local batch size 3, sequence length 512
```
"""


def test_sentences_of_torchtitans_log_are_options() -> None:
    bug = report(f"fully_shard on 8 GPUs\n{LOG}").bug
    assert {"fp8_all_gather", "checkpointing"} <= {*bug.stated} and {"dim", "seq_len"} <= {*bug.derived}
    assert bug.full_size["global_batch"] == 24


@pytest.mark.parametrize(
    ("text", "hardware"),
    [
        ("8xH100-80GB", "8 x H100 80 GB"),
        ("4 A40's", "4 x A40"),
        ("- GPU: H200", "H200"),
        ("4 nodes, each with 4 A100 GPUs", "A100"),
        ("This adds 27 seconds to the H100 test suite.", ""),
        ("other · comment · 2025-06-02\n8 H100s here", ""),
    ],
)
def test_hardware_is_counted_or_labelled(text: str, hardware: str) -> None:
    assert report(text).bug.bug.hardware == hardware


@pytest.mark.parametrize(
    ("title", "text", "symptom"),
    [
        ("an error in the computation of gradients", "", "wrong_numbers"),
        ("torch_compile belongs in the deepspeed file", "", "unknown"),
        ("a question", "The convergence suffers, numerics are slow.", "unknown"),
        ("a question", "```\nValueError: no\n```", "crash"),
    ],
)
def test_the_symptom_is_that_of_the_title_or_an_error(title: str, text: str, symptom: str) -> None:
    assert report(text, title).bug.bug.symptom == symptom
