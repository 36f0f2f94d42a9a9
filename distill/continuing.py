"""Continuing prompts in rows that are decoded together. A row whose text has ended takes the next prompt.

A text has random numbers of its own, so it does not depend on how many rows there are, nor on which one it has.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eesd.common.manifest import MASKED
from eesd.model.decoder import Decoder, Inputs, capped
from eesd.model.inputs import causal_inputs, empty_caches
from eesd.model.rotary import rotary_tables

SLOT_BUCKET = 64
"""Attention covers the slots in use, rounded up to a multiple of this number."""
PREFILL_ROWS = 16
"""First prompts that torch prefills together, padded to the longest."""
BLOCK = 64
"""Tokens whose probabilities are summed first, so that few sums depend on each other."""

Logits = NDArray[np.float32]
RandomNumbers = Callable[[int], np.random.Generator]
"""Gives the random numbers of a text by its number."""


class TextRows(Protocol):
    """The texts of B rows, each at its own position."""

    most_idle: float
    """Fraction of the rows that may be without a text before they are dropped."""

    def prefill(self, first: int, texts: Sequence[Sequence[int]]) -> None:
        """Put texts into consecutive rows, from ``first`` on."""
        ...

    def step(self, tokens: Sequence[int], positions: Sequence[int]) -> Sequence[Logits]:
        """Logits [V] behind one token of each row at its position."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        ...


class Writer(Protocol):
    """A model that writes."""

    def rows(self, count: int, slots: int) -> TextRows:
        """Rows for so many texts of at most ``slots`` tokens."""
        ...


class StreamWriter(Protocol):
    """A model that writes and chooses the tokens itself."""

    def texts(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        temperatures: Sequence[float],
        numbers: RandomNumbers,
        eos_token_ids: Sequence[int],
        rows: int | None = None,
    ) -> Iterable[tuple[int, list[int]]]:
        """The arguments of :func:`continue_prompts`; gives each text's index and the text, as they end."""
        ...


AnyWriter = Writer | StreamWriter


class TorchWriter:
    """Writes with torch, on the decoder's device."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def rows(self, count: int, slots: int) -> TextRows:
        return _TorchRows(self._decoder, count, slots)


class _TorchRows:
    """KV caches [B, KV, S, D]."""

    most_idle = 0.5

    def __init__(self, decoder: Decoder, count: int, slots: int) -> None:
        self._decoder, self._slots = decoder, slots
        self._weight = weight = decoder.lm_head.weight
        with torch.device(weight.device):
            caches = empty_caches(decoder.geometry, count, slots, decoder.geometry.num_layers)
            self._caches = [(k.to(weight.dtype), v.to(weight.dtype)) for k, v in caches]
            self._cos, self._sin = (table.to(weight.dtype) for table in rotary_tables(decoder.geometry, slots))

    def prefill(self, first: int, texts: Sequence[Sequence[int]]) -> None:
        """See :class:`TextRows`. The slots behind a short text get values, too, which its own tokens replace before they are
        seen."""
        for start in range(0, len(texts), PREFILL_ROWS):
            self._prefill(first + start, texts[start : start + PREFILL_ROWS])

    def _prefill(self, first: int, texts: Sequence[Sequence[int]]) -> None:
        longest = max(map(len, texts))
        if not longest:
            return
        inputs = causal_inputs(self._decoder.geometry, len(texts), longest, longest)
        inputs = self._inputs(inputs.position_ids, inputs.write_indices, inputs.attn_mask)
        rows = slice(first, first + len(texts))
        views = [(k[rows, :, :longest], v[rows, :, :longest]) for k, v in self._caches]
        self._hidden(padded(texts, longest)[0], inputs, views)

    def step(self, tokens: Sequence[int], positions: Sequence[int]) -> Sequence[Logits]:
        at = torch.tensor(positions)
        used = min(self._slots, -(-(max(positions) + 1) // SLOT_BUCKET) * SLOT_BUCKET)
        mask = torch.where(torch.arange(used) > at[:, None], MASKED, 0.0)[:, None, None]
        inputs = self._inputs(at[:, None], at, mask)
        views = [(k[:, :, :used], v[:, :, :used]) for k, v in self._caches]
        x = self._hidden(torch.tensor(tokens)[:, None], inputs, views)[:, 0]
        logits = self._decoder.lm_head(self._decoder.model.norm(x)).float()
        return list(capped(logits, self._decoder.geometry.logit_cap).cpu().numpy())

    def keep(self, rows: Sequence[int]) -> None:
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
    writer: AnyWriter,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    temperatures: Sequence[float],
    numbers: RandomNumbers,
    eos_token_ids: Sequence[int],
    rows: int | None = None,
) -> list[list[int]]:
    """Continue all prompts.

    Args:
        writer: The model.
        prompts: Token ids of each prompt; lengths may differ.
        limits: Maximum number of tokens of each text, its prompt included. A text also ends behind its first EOS token.
        temperatures: Sampling temperature of each text. 0 is greedy.
        numbers: The random numbers of each text.
        eos_token_ids: Tokens that end a text.
        rows: Texts that are decoded together; None: all.

    Returns:
        Each prompt with its continuation.
    """
    texts = [list(prompt) for prompt in prompts]
    if not hasattr(writer, "rows"):
        for index, text in writer.texts(prompts, limits, temperatures, numbers, eos_token_ids, rows):
            texts[index] = text
        return texts
    waiting = [index for index in reversed(range(len(texts))) if len(texts[index]) < limits[index]]
    if not waiting:
        return texts
    busy = [waiting.pop() for _ in range(min(rows or len(waiting), len(waiting)))]
    batch = writer.rows(len(busy), max(limits))
    batch.prefill(0, [texts[index][:-1] for index in busy])
    random = {index: numbers(index) for index, temperature in enumerate(temperatures) if temperature}
    ended: set[int] = set()
    while len(ended) < len(busy):
        logits = batch.step([texts[index][-1] for index in busy], [len(texts[index]) - 1 for index in busy])
        begun: list[int] = []
        for row, index in enumerate(busy):
            if row in ended:
                continue
            token = sample(logits[row], temperatures[index], random.get(index))
            texts[index].append(token)
            if token not in eos_token_ids and len(texts[index]) < limits[index]:
                continue
            if waiting:
                busy[row] = waiting.pop()
                begun.append(row)
            else:
                ended.add(row)
        for row in begun:  # behind the loop, because logits may be memory that this overwrites
            batch.prefill(row, [texts[busy[row]][:-1]])
        if len(ended) > batch.most_idle * len(busy):
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


def sample(logits: Logits, temperature: float, random: np.random.Generator | None) -> int:
    """A token by inversion of the cumulative distribution; the most likely one at temperature 0."""
    best = int(logits.argmax())
    if random is None:
        return best
    weights = np.zeros(-(-len(logits) // BLOCK) * BLOCK, np.float32)
    weights[: len(logits)] = np.exp((logits - logits[best]) / np.float32(max(temperature, 1e-4)))
    blocks = weights.reshape(-1, BLOCK)
    ends = blocks.sum(1, dtype=np.float64).cumsum()
    drawn = random.random() * ends[-1]
    block = int(np.searchsorted(ends, drawn, side="right"))
    inside = blocks[block].cumsum(dtype=np.float64) + (ends[block - 1] if block else 0.0)
    within = int(np.searchsorted(inside, drawn, side="right"))
    # Its sums may round to less than the block's own: the last token that has a probability then is meant.
    return block * BLOCK + (within if within < BLOCK else int(blocks[block].nonzero()[0][-1]))
