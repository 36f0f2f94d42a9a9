"""The frozen model as a teacher: hidden states after the exit layers, and its likeliest tokens for each position."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eesd.common.geometry import Geometry
from eesd.model.decoder import KV, Decoder, Inputs, causal_inputs, empty_caches

CHUNK = 1 << 25
"""Logits that are in memory at a time (128 MiB in float32)."""


@dataclass(frozen=True)
class Targets:
    """What the teacher says of a batch of rows [B, T].

    ``top_ids`` [B, T, K] are its likeliest tokens, best first, ``top_logprobs`` (float16) their log-probabilities in the whole
    distribution. ``final`` [B, T, hidden] is what its LM head gets, for the regression of hidden states.
    """

    top_ids: Tensor
    top_logprobs: Tensor
    final: Tensor | None = None


def element_type(precision: str) -> torch.dtype:
    """Of caches and kept hidden states."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


@contextmanager
def lowered(precision: str, device: torch.device) -> Iterator[None]:
    """Matrix products in bfloat16, where the precision asks for it."""
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        yield


def whole_text(
    geometry: Geometry, batch: int, tokens: int, caches: int, dtype: torch.dtype, device: torch.device
) -> tuple[Inputs, list[KV]]:
    """Inputs and ``caches`` empty caches for texts of ``tokens`` tokens seen whole, causally."""
    with torch.device(device):
        inputs = causal_inputs(geometry, batch, tokens, tokens)
        empty = [(k.to(dtype), v.to(dtype)) for k, v in empty_caches(geometry, batch, tokens, caches)]
    inputs.cos, inputs.sin, inputs.attn_mask = (t.to(dtype) for t in (inputs.cos, inputs.sin, inputs.attn_mask))
    return inputs, empty


class Teacher(nn.Module):
    """Whole texts [B, T] to their hidden states after each of ``layers`` and their :class:`Targets`.

    All layers write one and the same cache, one after another: a text seen whole needs no more.
    """

    def __init__(self, decoder: Decoder, layers: Sequence[int], top_k: int, precision: str, final: bool = False) -> None:
        super().__init__()
        self.decoder, self.layers, self.precision, self.final = decoder, tuple(layers), precision, final
        self.top_k = min(top_k, decoder.geometry.vocab_size)

    @torch.no_grad()  # not inference mode: its tensors could not take part in the student's backward pass
    def forward(self, ids: Tensor) -> tuple[dict[int, Tensor], Targets]:
        backbone, dtype = self.decoder.model, element_type(self.precision)
        inputs, (cache,) = whole_text(self.decoder.geometry, ids.shape[0], ids.shape[1], 1, dtype, ids.device)
        hidden = {}
        with lowered(self.precision, ids.device):
            x = backbone.embed_tokens(ids)
            for number, block in enumerate(backbone.layers, 1):
                x, _ = block(x, inputs, cache)
                if number in self.layers:
                    hidden[number] = x.to(dtype)
            x = backbone.norm(x)
        rows = x.flatten(0, 1)
        # Outside the autocast: rounded logits would turn close calls of the teacher into wrong labels.
        parts = [self._likeliest(part) for part in torch.split(rows, max(1, CHUNK // self.decoder.geometry.vocab_size))]
        top_ids, top_logprobs = (torch.cat(part).view(*ids.shape, -1) for part in zip(*parts, strict=True))
        return hidden, Targets(top_ids, top_logprobs, x.to(dtype) if self.final else None)

    def _likeliest(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids and log-probabilities [n, K] from what the LM head gets [n, hidden]."""
        logits = self.decoder.lm_head(rows.to(self.decoder.lm_head.weight.dtype)).float()
        values, ids = logits.topk(self.top_k)
        return ids.int(), (values - logits.logsumexp(-1, keepdim=True)).half()
