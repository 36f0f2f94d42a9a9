"""The losses per token, and the exit head as a training module."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, log_softmax
from torch.utils.checkpoint import checkpoint

from eesd.distill.ages import states_before
from eesd.distill.options import LossOptions
from eesd.distill.teacher import Batch, autocast, chunk_rows
from eesd.model.decoder import ExitHead
from eesd.model.torch_ops import KV, Inputs

LOSS_NAMES = ("ce", "kl", "tv")
"""The losses that :func:`token_losses` computes."""


def token_losses(
    features: Tensor, lm_head: Tensor, top_ids: Tensor, top_logprobs: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the losses of n tokens.

    Logits are computed in chunks. They are computed again in the backward pass, because the logits
    of a large vocabulary take too much memory to keep. A token outside of the draft vocabulary has
    no cross-entropy. The KL divergence treats all tokens that are not kept as one outcome, because
    scaling the kept tokens to a sum of 1 would make the head overconfident. The divergence is
    multiplied by the teacher's probability of the draft vocabulary, so that each position counts in
    proportion to the draft's possible gain. The total variation is the probability that rejection
    sampling at temperature 1 rejects the draft's token, ignoring tokens that are not kept.

    Args:
        features: Inputs [n, hidden] of the head's LM head.
        lm_head: Weight of the LM head [C, hidden]. The logits have C columns.
        top_ids: Columns of the teacher's most likely tokens [n, K], best first. A token outside of
            the draft vocabulary has the column -1.
        top_logprobs: Log-probabilities of these tokens [n, K].

    Returns:
        The losses ``LOSS_NAMES`` [3, n], and whether the head and the teacher have the same most
        likely token [n].
    """
    rows = chunk_rows(len(lm_head), features.device)
    if len(features) <= rows:
        return _chunk_losses(features, lm_head, top_ids, top_logprobs)
    chunks = zip(
        *(torch.split(tensor, rows) for tensor in (features, top_ids, top_logprobs)), strict=True
    )
    losses = []
    agreements = []
    for x, ids, logprobs in chunks:
        loss, agrees = checkpoint(
            _chunk_losses, x, lm_head, ids, logprobs, use_reentrant=False, preserve_rng_state=False
        )
        losses.append(loss)
        agreements.append(agrees)
    return torch.cat(losses, -1), torch.cat(agreements)


def _chunk_losses(
    features: Tensor, lm_head: Tensor, top_ids: Tensor, top_logprobs: Tensor
) -> tuple[Tensor, Tensor]:
    logits = linear(features, lm_head).float()
    outside = top_ids < 0
    ids = top_ids.long().clamp_min(0)
    student = log_softmax(logits, -1).gather(1, ids)
    teacher = top_logprobs.float()
    agrees = logits.argmax(-1) == top_ids[:, 0]
    kept, drafted = (logprobs.exp().masked_fill(outside, 0) for logprobs in (teacher, student))
    rest = 1 - teacher.exp().sum(-1)
    others = 1 - drafted.sum(-1)
    inside, rest, others = (part.clamp_min(1e-4) for part in (kept.sum(-1) + rest, rest, others))
    kl = (kept * (teacher - student)).sum(-1) + rest * (rest / others).log() - inside * inside.log()
    tv = (kept - drafted).clamp_min(0).sum(-1)
    return torch.stack([-student[:, 0].masked_fill(outside[:, 0], 0), kl, tv]), agrees


def total_loss(losses: Tensor, weight: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Combine the losses of all positions.

    Args:
        losses: The losses ``LOSS_NAMES`` [3, B, T].
        weight: Weight of each position [B, T].
        options: Weight of each loss.

    Returns:
        The total loss, and the weighted mean of each loss [3], detached.
    """
    means = (losses * weight).sum((1, 2)) / weight.sum().clamp_min(1)
    return options.ce * means[0] + options.kl * means[1] + options.tv * means[2], means.detach()


class Student(nn.Module):
    """An exit head with its losses. The frozen LM head is an argument of each call, so that it is
    not sharded or copied."""

    def __init__(self, head: ExitHead, options: LossOptions, precision: str) -> None:
        super().__init__()
        self.head = head
        self.options = options
        self.precision = precision

    def forward(
        self,
        batch: Batch,
        roots: Tensor | None,
        lm_head: Tensor,
        inputs: Inputs,
        caches: Sequence[KV],
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss of one batch [B, T].

        Args:
            batch: States, and the teacher's predictions.
            roots: Root of each position [B, T], for a head with deep layers.
            lm_head: Rows of the base model's LM head [C, hidden] for the head's columns. They are
                not used if the head has a separate LM head.
            inputs: Inputs of the head's blocks.
            caches: Empty KV caches, one per block.

        Returns:
            The loss and four metrics [4], which are the means of ``LOSS_NAMES`` and the fraction of
            positions that agree with the teacher.
        """
        own_lm_head = self.head.lm_head
        targets = batch.targets
        mask = batch.mask
        with autocast(self.precision, mask.device):
            hidden, *deep = [states.float() for states in batch.hidden]
            state = None if roots is None else states_before(self.head, deep, roots)
            features = self.head.lm_head_input(hidden, inputs, caches, state)
            losses, agrees = token_losses(
                features.flatten(0, 1),
                lm_head if own_lm_head is None else own_lm_head.weight,
                self.head.columns(targets.top_ids.flatten(0, 1)),
                targets.top_logprobs.flatten(0, 1),
            )
        agrees = agrees.view_as(mask) * mask
        loss, means = total_loss(losses.view(-1, *mask.shape), mask, self.options)
        return loss, torch.cat([means, (agrees.sum() / mask.sum().clamp_min(1))[None]])
