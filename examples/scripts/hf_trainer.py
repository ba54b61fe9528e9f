"""Train a small Llama with `transformers.Trainer`, which takes FSDP2 and FP8 from its launcher.

accelerate launch --num_processes 2 --use_fsdp --fsdp_version 2 --fsdp_cpu_ram_efficient_loading false
    --mixed_precision fp8 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP
    --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer hf_trainer.py --output_dir out --max_steps 4

accelerate 1.15 takes torchao where `--fp8_backend` is not given: with "ao" its ranks refuse it, its launcher "AO".
"""

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

SEQ_LEN, VOCAB = 32, 128


class Sequences(torch.utils.data.Dataset):
    def __init__(self, count):
        self.tokens = torch.randint(VOCAB, (count, SEQ_LEN), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main():
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    args.report_to, args.save_strategy, args.logging_steps = [], "no", 1
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQ_LEN,
        use_cache=False,
    )
    trainer = Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=Sequences(64))
    trainer.train()


if __name__ == "__main__":
    main()
