"""Continuing prompts in rows that are decoded together. A row whose text has ended takes the next prompt."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eesd.common.manifest import MASKED
from eesd.model.decoder import Decoder, Inputs
from eesd.model.inputs import causal_inputs, empty_caches
from eesd.model.rotary import rotary_tables

SLOT_BUCKET = 64
"""Attention covers the slots in use, rounded up to a multiple of this number."""
PREFILL_ROWS = 16
"""First prompts that are prefilled together, padded to the longest."""


class _Rows:
    """KV caches of B rows [B, KV, S, D], each at its own position."""

    def __init__(self, decoder: Decoder, count: int, slots: int) -> None:
        self._decoder, self._slots = decoder, slots
        self._weight = weight = decoder.lm_head.weight
        with torch.device(weight.device):
            caches = empty_caches(decoder.geometry, count, slots, decoder.geometry.num_layers)
            self._caches = [(k.to(weight.dtype), v.to(weight.dtype)) for k, v in caches]
            self._cos, self._sin = (table.to(weight.dtype) for table in rotary_tables(decoder.geometry, slots))

    def prefill(self, first: int, texts: Sequence[Sequence[int]]) -> None:
        """Put texts into the slots of consecutive rows, from ``first`` on.

        The slots behind a short text get values, too, which its own tokens replace before they are seen.
        """
        longest = max(map(len, texts))
        if not longest:
            return
        inputs = causal_inputs(self._decoder.geometry, len(texts), longest, longest)
        inputs = self._inputs(inputs.position_ids, inputs.write_indices, inputs.attn_mask)
        rows = slice(first, first + len(texts))
        views = [(k[rows, :, :longest], v[rows, :, :longest]) for k, v in self._caches]
        self._hidden(padded(texts, longest)[0], inputs, views)

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [B, V], float32, behind one token [B] of each row at its position [B]."""
        used = min(self._slots, -(-(int(positions.max()) + 1) // SLOT_BUCKET) * SLOT_BUCKET)
        mask = torch.where(torch.arange(used) > positions[:, None], MASKED, 0.0)[:, None, None]
        inputs = self._inputs(positions[:, None], positions, mask)
        views = [(k[:, :, :used], v[:, :, :used]) for k, v in self._caches]
        x = self._hidden(tokens[:, None], inputs, views)[:, 0]
        logits: Tensor = self._decoder.lm_head(self._decoder.model.norm(x))
        return logits.float().cpu()

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        self._caches = [(k[rows], v[rows]) for k, v in self._caches]

    def _inputs(self, positions: Tensor, write_indices: Tensor, mask: Tensor) -> Inputs:
        device = self._weight.device
        return Inputs(self._cos, self._sin, positions.to(device), write_indices.to(device), mask.to(self._weight))

    def _hidden(self, ids: Tensor, inputs: Inputs, caches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Hidden states [B, n, hidden] behind the last block for ids [B, n]. Writes the caches in place."""
        x: Tensor = self._decoder.model.embed_tokens(ids.to(self._weight.device))
        for block, cache in zip(self._decoder.model.layers, caches, strict=True):
            x, _ = block(x, inputs, cache)
        return x


@torch.inference_mode()
def continue_prompts(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    temperatures: Tensor,
    generator: torch.Generator,
    eos_token_ids: Sequence[int],
    rows: int | None = None,
) -> list[list[int]]:
    """Continue all prompts.

    Args:
        decoder: The model.
        prompts: Token ids of each prompt; lengths may differ.
        limits: Maximum number of tokens of each text, its prompt included. A text also ends behind its first EOS token.
        temperatures: Sampling temperature of each text [N]. 0 is greedy.
        generator: Source of the random numbers.
        eos_token_ids: Tokens that end a text.
        rows: Texts that are decoded together; None: all.

    Returns:
        Each prompt with its continuation.
    """
    texts = [list(prompt) for prompt in prompts]
    waiting = [index for index in reversed(range(len(texts))) if len(texts[index]) < limits[index]]
    if not waiting:
        return texts
    busy = [waiting.pop() for _ in range(min(rows or len(waiting), len(waiting)))]
    batch = _Rows(decoder, len(busy), max(limits))
    for row in range(0, len(busy), PREFILL_ROWS):
        batch.prefill(row, [texts[index][:-1] for index in busy[row : row + PREFILL_ROWS]])
    ended: set[int] = set()
    while len(ended) < len(busy):
        lengths = torch.tensor([len(texts[index]) for index in busy])
        logits = batch.step(torch.tensor([texts[index][-1] for index in busy]), lengths - 1)
        sampled = _sample(logits, temperatures[busy], generator)
        for row, (index, token) in enumerate(zip(busy, sampled.tolist(), strict=True)):
            if row in ended:
                continue
            texts[index].append(token)
            if token not in eos_token_ids and len(texts[index]) < limits[index]:
                continue
            if waiting:
                busy[row] = waiting.pop()
                batch.prefill(row, [texts[busy[row]][:-1]])
            else:
                ended.add(row)
        if 2 * len(ended) > len(busy):
            kept = [row for row in range(len(busy)) if row not in ended]
            batch.keep(kept)
            busy, ended = [busy[row] for row in kept], set()
    return texts


def padded(texts: Sequence[Sequence[int]], width: int) -> tuple[Tensor, Tensor]:
    """Texts as a tensor [N, width], padded with 0, and their lengths [N]."""
    tokens = torch.zeros(len(texts), width, dtype=torch.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    return tokens, torch.tensor([len(text) for text in texts])


def _sample(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """A token for each row, by inversion of the cumulative distribution; greedy at temperature 0. Overwrites logits [B, V]."""
    best, greedy = logits.max(-1, keepdim=True)
    if not temperatures.any():
        return greedy[:, 0]
    # In place: memory for a large vocabulary takes longer to get than to fill.
    cumulative = logits.sub_(best).div_(temperatures.clamp_min(1e-4)[:, None]).exp_().cumsum_(-1)
    drawn = torch.rand(len(logits), 1, generator=generator) * cumulative[:, -1:]
    sampled = torch.searchsorted(cumulative, drawn, right=True)[:, 0].clamp_max(logits.shape[1] - 1)
    return torch.where(temperatures > 0, sampled, greedy[:, 0])
