"""Optimizers of the head: Muon for its matrices and AdamW for the rest, or AdamW for all."""

import torch
from torch import nn

from eesd.distill.options import Training


def make_optimizers(head: nn.Module, training: Training) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) takes the blocks' matrices, scaled so that one learning rate serves both optimizers."""
    matrices = [p for name, p in head.named_parameters() if p.ndim == 2 and not name.startswith("lm_head")]
    if training.optimizer == "adamw":
        return [torch.optim.AdamW(head.parameters(), lr=training.lr, betas=(0.9, 0.95), weight_decay=0.0)]
    chosen = set(map(id, matrices))
    rest = [p for p in head.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=training.lr, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=training.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
