"""Train a small transformer with Lightning, FSDP2 and torchao's float8.

torchrun --nproc_per_node 2 lightning_fsdp2.py
"""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

STEPS, BATCH, SEQ_LEN, VOCAB, DIM = 4, 4, 32, 128, 64


class LanguageModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = None

    def configure_model(self):
        if self.model is not None:
            return
        torch.manual_seed(42)
        layers = [nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, dropout=0.0, batch_first=True) for _ in range(2)]
        model = nn.Sequential(nn.Embedding(VOCAB, DIM), *layers, nn.Linear(DIM, VOCAB, bias=False))
        config = Float8LinearConfig.from_recipe_name("rowwise")
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "linear" in name)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = self.device_mesh["data_parallel"]
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        self.model = fully_shard(model, mesh=mesh, mp_policy=policy)

    def training_step(self, batch, index):
        (tokens,) = batch
        loss = F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_batch_end(self, outputs, batch, index):
        if self.global_rank == 0:
            print(f"step {index + 1}: loss {self.trainer.callback_metrics['loss'].item():.4f}")


def main():
    L.seed_everything(42)
    tokens = torch.randint(VOCAB, (64, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    trainer = L.Trainer(
        accelerator="cuda",
        devices=torch.cuda.device_count(),
        strategy=ModelParallelStrategy(data_parallel_size=torch.cuda.device_count(), tensor_parallel_size=1),
        max_steps=STEPS,
        gradient_clip_val=None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LanguageModel(), DataLoader(TensorDataset(tokens), batch_size=BATCH, shuffle=True))


if __name__ == "__main__":
    main()
