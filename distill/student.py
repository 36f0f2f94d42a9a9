"""The head as it learns: hidden states after the exit layer in, loss out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from eesd.distill.losses import combined, head_losses, reach, regression
from eesd.distill.options import Losses
from eesd.distill.teacher import Targets, lowered
from eesd.model.decoder import KV, Inputs
from eesd.model.exit_head import ExitHead


@dataclass(frozen=True)
class Batch:
    """Rows [B, T]: hidden states [B, T, hidden] after the exit layer, the teacher's targets, the text's next tokens, and which
    positions count (mask, 0 or 1)."""

    hidden: Tensor
    targets: Targets
    text: Tensor
    mask: Tensor

    def to(self, device: torch.device) -> "Batch":
        final = self.targets.final
        targets = Targets(
            self.targets.top_ids.to(device),
            self.targets.top_logprobs.to(device),
            None if final is None else final.to(device),
        )
        return replace(
            self, hidden=self.hidden.to(device), targets=targets, text=self.text.to(device), mask=self.mask.to(device)
        )


class Student(nn.Module):
    """An exit head and its losses. The frozen LM head's weight is an argument, so that nothing shards or copies it."""

    def __init__(self, head: ExitHead, losses: Losses, precision: str) -> None:
        super().__init__()
        self.head, self.losses, self.precision = head, losses, precision

    def forward(
        self,
        hidden: Tensor,
        top_ids: Tensor,
        top_logprobs: Tensor,
        text: Tensor,
        mask: Tensor,
        final: Tensor | None,
        lm_head: Tensor,
        inputs: Inputs,
        caches: Sequence[KV],
    ) -> tuple[Tensor, Tensor]:
        """The loss and [4] figures: the means of its parts and the share of positions that agree with the teacher."""
        own = self.head.lm_head
        with lowered(self.precision, hidden.device):
            features, _ = self.head.features(hidden.float(), inputs, list(caches))
            parts, agrees = head_losses(
                features.flatten(0, 1),
                lm_head if own is None else own.weight,
                top_ids.flatten(0, 1),
                top_logprobs.flatten(0, 1),
                text.flatten(),
                self.losses,
            )
        agrees = agrees.view_as(mask) * mask
        weight = mask * reach(agrees, self.losses.unroll, self.losses.unroll_decay)
        loss, means = combined(parts.view(-1, *mask.shape), weight, self.losses)
        if self.losses.hidden and final is not None:
            loss = loss + self.losses.hidden * regression(features, final, weight)
        return loss, torch.cat([means, (agrees.sum() / mask.sum().clamp_min(1))[None]])
