"""What a report denies, doubts or leaves unsaid sets nothing, and other software is refused by its name."""

from __future__ import annotations

import pytest

from tests.unit.bugs.test_reports import ASYNC, LEADING_DIMS, NAN_STEPS, head, imported

TE_YAML = """fp8_config:
  backend: TE
mixed_precision: fp8
"""
NAMED = {
    f"accelerate fails. My file:\n{TE_YAML}": "TransformerEngine",
    "We train with `--fp8_recipe delayed` on 8 GPUs": "delayed scaling",
    "```\ntorchrun t.py --fp8_recipe delayed --fp8-format hybrid\n```": "TransformerEngine|delayed scaling",
    "```\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\n```": "FSDP1",
    "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 1\n": "FSDP1",
    "```python\nfrom torch.distributed.fsdp import FullyShardedDataParallel as F\nm = F(m)\n```": "FSDP1",
    "We run float8 with DDP on 8 GPUs": "DDP",
    "```python\nimport deepspeed\nengine = deepspeed.initialize(model=m)\n```": "ZeRO",
    "stage: sft\ndeepspeed: examples/z3.json\nbf16: true\n": "ZeRO",
    "base_model: Qwen/Qwen3-30B-A3B\nfp8: true\n": "a mixture of experts",
}


@pytest.mark.parametrize(("text", "names"), NAMED.items(), ids=list(NAMED.values()))
def test_other_software_is_refused_with_and_without_a_fence(text: str, names: str) -> None:
    bug = imported(head("pytorch/ao", 1, "2025-01-01", "training crashes") + text).bug
    assert "|".join(sorted(bug.refused)) == names and bug.case is None


@pytest.mark.parametrize(
    ("repository", "title", "day", "refused"),
    [
        ("NVIDIA/TransformerEngine", "loss is nan", "2025-01-01", "TransformerEngine"),
        ("NVIDIA/Megatron-LM", "[QUESTION] fp8 can not set pp>1", "2025-01-01", "TransformerEngine"),
        ("NVIDIA/Megatron-LM", "loss is nan", "2025-01-01", ""),
        ("NVIDIA-NeMo/Automodel", "fp8 loss is nan", "2025-01-01", ""),
        ("deepspeedai/DeepSpeed", "loss is nan", "2025-01-01", "ZeRO"),
        ("NVIDIA-NeMo/Megatron-Bridge", "Bug in MXFP8 Recipe", "2025-09-14", "TransformerEngine"),
        ("facebookresearch/fairseq2", "Fix fp16 scaling when used with TP", "2025-10-15", "float16"),
        ("pytorch/ao", "FP8 is slower than FP16", "2025-10-15", ""),
        ("hpcaitech/ColossalAI", "fp8 linears check dimensions", "2025-11-12", "FP8 of another library"),
        ("vllm-project/vllm", "it hangs with two servers", "2025-01-01", "inference"),
        ("huggingface/gpt-oss-recipes", "OOM", "2025-08-07", "a mixture of experts"),
        ("axolotl-ai-cloud/axolotl", "Falcon with FSDP", "2023-06-13", "FSDP1"),
        ("axolotl-ai-cloud/axolotl", "Falcon with FSDP", "2025-06-13", ""),
        ("pytorch/torchtitan", "[do not land] float8 with blockwise scaling", "2025-06-18", "block-wise scaling"),
        ("pytorch/ao", "not compilable when pipeline parallel", "2025-12-09", ""),
        ("pytorch/torchtitan", "norms differ under DDP / HSDP", "2026-02-03", ""),
        ("pytorch/ao", "Delete delayed scaling", "2025-01-30", ""),
    ],
)
def test_title_and_repository_refuse_by_name(repository: str, title: str, day: str, refused: str) -> None:
    """Issues of a repository are about its own software, and those before FSDP2 about FSDP1."""
    refusals = imported(head(repository, 1, day, title)).bug.refused
    assert refused in refusals if refused else not refusals


@pytest.mark.parametrize(
    "text",
    [
        "fully_shard with `fsdp_version: 2` and fsdp_sharding_strategy: FULL_SHARD",
        "distributed_type: FSDP\nfsdp_version: 2\n",
        "```python\nfrom torch.distributed.fsdp import FullyShardedDataParallel, fully_shard\nfully_shard(m)\n```",
        "It does not happen with DDP. Unlike DDP, nothing is replicated.",
        "We never ran it with DDP, and rule out a mixture of experts.",
    ],
)
def test_what_was_not_run_refuses_nothing(text: str) -> None:
    assert imported(head("pytorch/ao", 1, "2025-01-01", "float8 crash") + text).bug.refused == {}


@pytest.mark.parametrize(
    "text",
    [
        "So this is just float8 rowwise + FSDP, so that rules out any async TP changes..",
        "We never enabled async TP.",
        "I don't think that async TP is on.",
        "async TP was not enabled.",
        "async TP is disabled here.",
        "Perhaps it shows with async TP as well.",
        "Would async TP help?",
        "somebody-else · comment · 2025-01-02\nI use async TP, TP=4.",
    ],
)
def test_a_denied_or_doubted_word_states_nothing(text: str) -> None:
    bug = imported(head("pytorch/ao", 1, "2025-01-01", "float8 crash") + f"FSDP=2\n{text}\n").bug
    assert bug.case is not None and not {"async_tp", "tp"} & {*bug.stated, *bug.missing}
    assert (bug.case.layout.async_tp, bug.case.layout.tp, bug.case.layout.dp_shard) == (False, 1, 2)


def test_what_failed_denies_nothing() -> None:
    for text in ("It does not work with TP=4", "TP=4 does not converge", "no speedup with TP=4"):
        assert imported(head("pytorch/ao", 1, "2025-01-01", text)).bug.stated["tp"]


@pytest.mark.parametrize("fence", ["```", "~~~", "```markdown", "```text"])
def test_a_fence_around_the_whole_report_hides_nothing(fence: str) -> None:
    for text in (ASYNC, LEADING_DIMS, NAN_STEPS):
        plain, fenced = imported(text).bug, imported(f"{fence}\n{text}\n{fence[:3]}\n").bug
        assert (fenced.case, fenced.stated, fenced.bug) == (plain.case, plain.stated, plain.bug)


def test_what_is_not_read_is_told() -> None:
    options = "--training.steps 1000 --optimizer.lr 3e-4 --parallelism.data_parallel_shard_degree 2"
    text = f"`run_train.sh {options}`\n- TP=2\n- warmup: 7\n- recipe of ours = none\nWe never enabled async TP.\n"
    imported_bug = imported(head("pytorch/torchtitan", 1, "2025-01-01", "float8 crash") + text)
    assert (
        imported_bug.bug.stated["tp"] == "- TP=2"
        and imported_bug.bug.case is not None
        and imported_bug.bug.case.train.steps == 5
    )
    for words in ("--training.steps 1000: ", "--optimizer.lr 3e-4: ", "- warmup: 7: not understood", "recipe of ours"):
        assert any(words in line for line in imported_bug.ignored), words
    assert any(line.startswith("We never enabled async TP: it may say") for line in imported_bug.ignored)


def test_few_steps_are_those_of_the_case() -> None:
    bug = imported(head("pytorch/torchtitan", 1, "2025-01-01", "crash") + "`run_train.sh --training.steps=9`").bug
    assert bug.case is not None and bug.case.train.steps == 9 and "steps" in bug.stated


@pytest.mark.parametrize("ranks", [10, 11, 12, 18, 24])
def test_fewer_ranks_divide_those_that_were_run(ranks: int) -> None:
    bug = imported(head("pytorch/ao", 1, "2025-01-01", "float8 crash") + f"fully_shard on {ranks} GPUs").bug
    assert bug.case is not None and bug.case.world_size <= 8
    assert ranks == 11 or ranks % bug.case.layout.dp_shard == 0
    assert ("no divisor of 11 fits" if ranks == 11 else "which divides it") in bug.derived["dp_shard"]
