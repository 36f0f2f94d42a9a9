"""The losses by token, in chunks of the vocabulary's size, and what multi-step training means for an exit head."""

import torch
from torch import Tensor
from torch.nn.functional import linear, log_softmax, smooth_l1_loss
from torch.utils.checkpoint import checkpoint

from eesd.distill.options import Losses
from eesd.distill.teacher import CHUNK

PARTS = ("ce", "kl", "text")


def head_losses(
    features: Tensor, lm_head: Tensor, top_ids: Tensor, top_logprobs: Tensor, text: Tensor, losses: Losses
) -> tuple[Tensor, Tensor]:
    """The parts ``PARTS`` of the loss [3, n] and whether the head's likeliest token is the teacher's [n].

    For n tokens: features [n, hidden] of the head, the teacher's top_ids and top_logprobs [n, K], the text's next tokens [n].
    Logits over a large vocabulary are made a chunk at a time and once more in the backward pass, instead of kept.
    """
    rows = max(1, CHUNK // len(lm_head))
    if len(features) <= rows:
        return _chunk(features, lm_head, top_ids, top_logprobs, text, losses.temperature)
    pieces = zip(*(torch.split(tensor, rows) for tensor in (features, top_ids, top_logprobs, text)), strict=True)
    parts, agreements = [], []
    for x, ids, logprobs, tokens in pieces:
        part, agrees = checkpoint(_chunk, x, lm_head, ids, logprobs, tokens, losses.temperature, use_reentrant=False)
        parts.append(part)
        agreements.append(agrees)
    return torch.cat(parts, -1), torch.cat(agreements)


def _chunk(
    features: Tensor, lm_head: Tensor, top_ids: Tensor, top_logprobs: Tensor, text: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = linear(features, lm_head).float()
    wanted = torch.cat([top_ids.long(), text[:, None]], 1)  # all at once: the backward pass of a gather costs n x V
    logprobs = log_softmax(logits, -1).gather(1, wanted)
    heated = logprobs[:, :-1] if temperature == 1 else log_softmax(logits / temperature, -1).gather(1, wanted[:, :-1])
    teacher = log_softmax(top_logprobs.float() / temperature, -1)
    kl = temperature**2 * (teacher.exp() * (teacher - heated)).sum(-1)
    return torch.stack([-logprobs[:, 0], kl, -logprobs[:, -1]]), logits.argmax(-1) == top_ids[:, 0]


def reach(agrees: Tensor, unroll: int, decay: float) -> Tensor:
    """How much each position [B, T] weighs when the head drafts ``unroll`` tokens from every root.

    EAGLE-3 and HASS unroll their head because it reads its own drafts' features in use. This head does not: the layers before
    it run on the drafted tokens, and the verify pass writes its cache with its own weights, so for given tokens one parallel
    pass computes exactly what drafting does. What is left of unrolling is where drafts go: step i + 1 from a root happens when
    the i drafts before it were the model's own tokens. So over all roots, a position weighs the sum over i < ``unroll`` of
    ``decay ** i`` where the i positions before it agree.
    """
    weight = torch.ones(agrees.shape, device=agrees.device)
    run = weight
    for step in range(1, unroll):
        run = torch.nn.functional.pad((agrees * run)[:, :-1], (1, 0))
        weight = weight + decay**step * run
    return weight


def combined(parts: Tensor, weight: Tensor, losses: Losses) -> tuple[Tensor, Tensor]:
    """The loss, and the weighted means of its parts [3], from parts [3, B, T] and weights [B, T]."""
    means = (parts * weight).sum((1, 2)) / weight.sum().clamp_min(1)
    scale = torch.tensor([losses.ce, losses.kl, losses.text], device=means.device)
    return (means * scale).sum(), means.detach()


def regression(features: Tensor, final: Tensor, weight: Tensor) -> Tensor:
    """Smooth L1 between the features of head and teacher [B, T, hidden], a weighted mean."""
    distance = smooth_l1_loss(features.float(), final.float(), reduction="none").mean(-1)
    return (distance * weight).sum() / weight.sum().clamp_min(1)
