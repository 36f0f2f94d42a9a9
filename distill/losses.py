"""The losses per token, and the exit head as a training module."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, log_softmax, smooth_l1_loss
from torch.utils.checkpoint import checkpoint

from eesd.distill.ages import states_before
from eesd.distill.options import LossOptions
from eesd.distill.teacher import Batch, autocast, chunk_rows
from eesd.model.decoder import KV, Inputs
from eesd.model.exit_head import ExitHead

LOSS_NAMES = ("ce", "kl", "text", "overlap")
"""The losses that :func:`token_losses` computes."""


def token_losses(
    features: Tensor, lm_head: Tensor, top_ids: Tensor, top_logprobs: Tensor, next_tokens: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Compute the losses of n tokens.

    Logits are computed in chunks, and again in the backward pass: with a large vocabulary they take too much memory to keep.

    A token outside of the draft vocabulary has no cross-entropy. The KL divergence is that of the teacher's distribution over
    the draft vocabulary, times the probability that the teacher gives to the draft vocabulary. So a position counts as much as
    the draft can win there, and the probability of the other tokens teaches no wrong ones.

    Args:
        features: The head's LM head inputs [n, hidden].
        lm_head: Weight of the LM head [C, hidden]; C columns of logits.
        top_ids: Columns of the teacher's most likely tokens [n, K], best first; -1 outside of the draft vocabulary.
        top_logprobs: Their log-probabilities [n, K].
        next_tokens: Columns of the text's next tokens [n], or -1.
        temperature: Temperature of the KL divergence.

    Returns:
        The losses ``LOSS_NAMES`` [4, n] in nats, and whether the head's most likely token is the teacher's [n].
    """
    rows = chunk_rows(len(lm_head), features.device)
    if len(features) <= rows:
        return _chunk_losses(features, lm_head, top_ids, top_logprobs, next_tokens, temperature)
    chunks = zip(*(torch.split(tensor, rows) for tensor in (features, top_ids, top_logprobs, next_tokens)), strict=True)
    losses, agreements = [], []
    for x, ids, logprobs, tokens in chunks:
        arguments = (x, lm_head, ids, logprobs, tokens, temperature)
        loss, agrees = checkpoint(_chunk_losses, *arguments, use_reentrant=False, preserve_rng_state=False)
        losses.append(loss)
        agreements.append(agrees)
    return torch.cat(losses, -1), torch.cat(agreements)


def _chunk_losses(
    features: Tensor, lm_head: Tensor, top_ids: Tensor, top_logprobs: Tensor, next_tokens: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = linear(features, lm_head).float()
    ids = torch.cat([top_ids.long(), next_tokens[:, None]], 1)  # one gather for all: its backward pass costs n x C
    outside, ids = ids < 0, ids.clamp_min(0)
    logprobs = log_softmax(logits, -1).gather(1, ids)
    student = logprobs[:, :-1] if temperature == 1 else log_softmax(logits / temperature, -1).gather(1, ids[:, :-1])
    teacher = log_softmax(top_logprobs.float() / temperature, -1)
    weight, agrees = teacher.exp().masked_fill(outside[:, :-1], 0), logits.argmax(-1) == top_ids[:, 0]
    inside = weight.sum(-1, keepdim=True).clamp_min(1e-9).log()
    kl = temperature**2 * (weight * (teacher - inside - student)).sum(-1)
    cross_entropies = -logprobs.masked_fill(outside, 0)
    return torch.stack([cross_entropies[:, 0], kl, cross_entropies[:, -1], _overlap_loss(student, weight)]), agrees


def _overlap_loss(student: Tensor, weight: Tensor) -> Tensor:
    """How unlikely it is that a sampled draft is accepted: -log of the overlap of both distributions (arXiv 2602.23881).

    Args:
        student: Log-probabilities of the teacher's tokens [n, K].
        weight: The teacher's probabilities of tokens that can be drafted, else 0 [n, K].
    """
    overlap, most = torch.minimum(student.exp(), weight).sum(-1), weight.sum(-1)
    return (most.clamp_min(1e-9).log() - overlap.clamp_min(1e-9).log()).clamp_min(0) * most


def reach_weights(agrees: Tensor, unroll: int, decay: float) -> Tensor:
    """Weigh each position by the roots from which a draft of ``unroll`` tokens reaches it.

    EAGLE-3 and HASS unroll their head in training because it reads features that it computed from its own drafts. An exit head
    does not: the layers before it run on the drafted tokens, and the verify pass writes its KV cache with the head's own
    weights. For given tokens, one parallel pass computes exactly what drafting computes. Unrolling can only change which
    positions count: draft step i + 1 from a root takes place if the i drafts before it are the model's own tokens.

    Args:
        agrees: 1 where the head agrees with the teacher, else 0 [B, T].
        unroll: Draft length.
        decay: Draft step i has the weight ``decay ** i``.

    Returns:
        Weights [B, T]: the sum over i < ``unroll`` of ``decay ** i`` where the i positions before agree.
    """
    weight = torch.ones(agrees.shape, device=agrees.device)
    reached = weight
    for step in range(1, unroll):
        reached = torch.nn.functional.pad((agrees * reached)[:, :-1], (1, 0))
        weight = weight + decay**step * reached
    return weight


def total_loss(losses: Tensor, weight: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Combine the losses of all positions.

    Args:
        losses: The losses ``LOSS_NAMES`` [4, B, T].
        weight: Weight of each position [B, T].
        options: Weight of each loss.

    Returns:
        The total loss, and the weighted mean of each loss [4], detached.
    """
    means = (losses * weight).sum((1, 2)) / weight.sum().clamp_min(1)
    return (means * _loss_weights(options, means.device)).sum(), means.detach()


@lru_cache(maxsize=8)
def _loss_weights(options: LossOptions, device: torch.device) -> Tensor:
    """The weights of ``LOSS_NAMES`` [4]. They are kept, because a copy to a GPU waits for its work."""
    return torch.tensor([options.ce, options.kl, options.text, options.overlap], device=device)


def hidden_state_loss(features: Tensor, final_hidden: Tensor, weight: Tensor) -> Tensor:
    """Compute the smooth L1 distance between the LM head inputs of the head and of the teacher.

    Args:
        features: Of the head [B, T, hidden].
        final_hidden: Of the teacher [B, T, hidden].
        weight: Weight of each position [B, T].

    Returns:
        The weighted mean.
    """
    distance = smooth_l1_loss(features.float(), final_hidden.float(), reduction="none").mean(-1)
    return (distance * weight).sum() / weight.sum().clamp_min(1)


class Student(nn.Module):
    """An exit head with its losses. The frozen LM head is an argument of each call, so that it is not sharded or copied."""

    def __init__(self, head: ExitHead, options: LossOptions, precision: str) -> None:
        super().__init__()
        self.head, self.options, self.precision = head, options, precision

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
            lm_head: Rows of the base model's LM head [C, hidden] for the head's columns; not used if it has its own.
            inputs: Inputs of the head's blocks.
            caches: Empty KV caches, one per block.

        Returns:
            The loss, and [5] metrics: the means of ``LOSS_NAMES`` and the fraction of positions that agree with the teacher.
        """
        own_lm_head, targets, mask = self.head.lm_head, batch.targets, batch.mask
        with autocast(self.precision, mask.device):
            hidden, *deep = [states.float() for states in batch.hidden]
            state = None if roots is None else states_before(self.head, deep, roots)
            features, _ = self.head.lm_head_input(hidden, inputs, list(caches), state)
            losses, agrees = token_losses(
                features.flatten(0, 1),
                lm_head if own_lm_head is None else own_lm_head.weight,
                self.head.columns(targets.top_ids.flatten(0, 1)),
                targets.top_logprobs.flatten(0, 1),
                self.head.columns(batch.next_tokens.flatten()),
                self.options.temperature,
            )
        agrees = agrees.view_as(mask) * mask
        weight = mask * reach_weights(agrees, self.options.unroll, self.options.unroll_decay)
        loss, means = total_loss(losses.view(-1, *mask.shape), weight, self.options)
        if self.options.hidden and targets.final_hidden is not None:
            loss = loss + self.options.hidden * hidden_state_loss(features, targets.final_hidden, weight)
        return loss, torch.cat([means, (agrees.sum() / mask.sum().clamp_min(1))[None]])
