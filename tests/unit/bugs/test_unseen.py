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
    ],
)
def test_options_refuse_by_name(flags: str, name: str) -> None:
    assert name in report(f"```\ntorchrun train.py {flags}\n```").bug.refused


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
    assert bug.refused == {} and {name for name, words in bug.missing.items() if "No case has it" in words} == names


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
