import torch

from harness.worker.targets.reference.build import build

__all__ = ["build", "plant"]


def plant(name: str) -> None:
    cross_entropy = torch.nn.functional.cross_entropy
    torch.nn.functional.cross_entropy = lambda *args, **options: 10 * cross_entropy(*args, **options)
