"""Train a small Llama with accelerate, FSDP2 and torchao's float8.

accelerate launch --num_processes 2 accelerate_fsdp2.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import AORecipeKwargs, FullyShardedDataParallelPlugin, set_seed
from torch.utils.data import DataLoader, TensorDataset
from torchao.float8 import Float8LinearConfig
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, BATCH, SEQ_LEN, VOCAB = 4, 4, 32, 128


def build_model():
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
    return LlamaForCausalLM(config)


def main():
    set_seed(42)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    recipe = AORecipeKwargs(config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    accelerator = Accelerator(mixed_precision="fp8", fsdp_plugin=plugin, kwargs_handlers=[recipe])

    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    tokens = torch.randint(VOCAB, (64, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(tokens), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    model.train()
    for step, (batch,) in enumerate(loader):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), reduction="mean")
        accelerator.print(f"step {step + 1}: loss {mean.item():.4f}, norm {norm.item():.4f}")
        if step + 1 == STEPS:
            break
    accelerator.end_training()


if __name__ == "__main__":
    main()
