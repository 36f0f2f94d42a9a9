"""Continue prompts in the rows of a batch. When a text ends, its row takes the next prompt.

Each text has separate random numbers. The text therefore depends neither on the number of rows nor
on its row. Tokens are chosen on the device of the logits, so a GPU sends the host only tokens, and
no logits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from eesd.common.architecture import after_layers
from eesd.common.errors import EESDError
from eesd.common.manifest import MASKED
from eesd.distill.teacher import wide_logits
from eesd.model.decoder import Decoder
from eesd.model.inputs import causal_inputs, empty_caches
from eesd.model.rotary import rotary_tables
from eesd.model.torch_ops import KV, Inputs, capped

SLOT_BUCKET = 64
"""Attention covers the slots in use, rounded up to a multiple of this number."""
PREFILL_ROWS = 16
"""Number of prompts that torch prefills together. They are padded to the longest prompt."""
BLOCK = 64
"""Number of tokens in a block. Each block is summed first, so that few sums depend on each
other."""

RandomNumbers = Callable[[int], np.random.Generator]
"""A function that returns the random numbers of a text, given the number of the text."""


@dataclass(frozen=True)
class Writing:
    """Prompts for a model to continue, and the settings of each text.

    Attributes:
        prompts: Token ids of each prompt. Their lengths may differ.
        limits: Maximum number of tokens of each text, including its prompt. A text also ends after
            its first EOS token.
        temperatures: Sampling temperature of each text. 0 is greedy.
        numbers: The random numbers of each text.
        eos_token_ids: Tokens that end a text.
        rows: Maximum number of texts in a batch, or None for all texts.
    """

    prompts: Sequence[Sequence[int]]
    limits: Sequence[int]
    temperatures: Sequence[float]
    numbers: RandomNumbers
    eos_token_ids: Sequence[int]
    rows: int | None = None

    def __post_init__(self) -> None:
        if not len(self.prompts) == len(self.limits) == len(self.temperatures):
            raise EESDError(
                "Each prompt needs a limit and a temperature; give the same number of each."
            )
        if not all(map(len, self.prompts)):
            raise EESDError("A prompt has no tokens; give prompts of at least one token.")
        if min(self.temperatures, default=0) < 0 or (self.rows is not None and self.rows < 1):
            raise EESDError("Temperatures must be 0 or above, and rows at least 1.")

    def waiting(self) -> list[int]:
        """Return the indices of the prompts that have room for a token, in reverse order."""
        return [
            index
            for index in reversed(range(len(self.prompts)))
            if len(self.prompts[index]) < self.limits[index]
        ]

    def random(self, index: int) -> np.random.Generator | None:
        """Return the random numbers of a text, or None if the text is greedy."""
        return self.numbers(index) if self.temperatures[index] else None


class Writer(Protocol):
    """A model that writes texts."""

    def texts(self, writing: Writing) -> Iterator[tuple[int, list[int]]]:
        """Yield each prompt's index and the prompt with its continuation, in the order in which the
        texts end. A prompt that fills its limit is skipped."""
        ...


class TextRows(Protocol):
    """The texts of B rows, each at a separate position."""

    most_idle: float
    """The rows without a text are dropped when their fraction exceeds this number."""

    def prefill(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
        """Put a text into each of these rows."""
        ...

    def step(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Run one token of each row at its position. Returns the logits [B, V]."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        ...


class TorchWriter:
    """Writes texts with torch, on the decoder's device."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def texts(self, writing: Writing) -> Iterator[tuple[int, list[int]]]:
        return texts_of_rows(partial(_TorchRows, self._decoder), writing)


class _TorchRows:
    """KV caches [B, KV, S, D]."""

    most_idle = 0.5

    def __init__(self, decoder: Decoder, count: int, slots: int) -> None:
        self._decoder = decoder
        self._slots = slots
        self._weight = weight = decoder.lm_head.weight
        with torch.device(weight.device):
            caches = empty_caches(decoder.geometry, count, slots)
            self._caches = [(k.to(weight.dtype), v.to(weight.dtype)) for k, v in caches]
            tables = map(torch.tensor, rotary_tables(decoder.geometry, slots))
            self._cos, self._sin = (table.to(weight.dtype) for table in tables)

    def prefill(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
        for start in range(0, len(rows), PREFILL_ROWS):
            self._prefill(
                list(rows[start : start + PREFILL_ROWS]), texts[start : start + PREFILL_ROWS]
            )

    def _prefill(self, rows: list[int], texts: Sequence[Sequence[int]]) -> None:
        """Prefill padded rows. The slots after a short text are written, too. Later tokens of the
        text overwrite them before attention reads them."""
        longest = max(map(len, texts))
        if not longest:
            return
        inputs = causal_inputs(self._decoder.geometry, len(texts), longest, longest)
        inputs = self._inputs(inputs.position_ids, inputs.write_indices, inputs.attn_mask)
        new = [(k[rows, :, :longest], v[rows, :, :longest]) for k, v in self._caches]
        self._normed(padded(texts, longest)[0], inputs, new)
        for (k, v), (keys, values) in zip(self._caches, new, strict=True):
            k[rows, :, :longest] = keys
            v[rows, :, :longest] = values

    def step(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        at = torch.tensor(positions)
        used = min(self._slots, -(-(max(positions) + 1) // SLOT_BUCKET) * SLOT_BUCKET)
        mask = torch.where(torch.arange(used) > at[:, None], MASKED, 0.0)[:, None, None]
        inputs = self._inputs(at[:, None], at, mask)
        views = [(k[:, :, :used], v[:, :, :used]) for k, v in self._caches]
        x = self._normed(torch.tensor(tokens)[:, None], inputs, views)[:, 0]
        logits = wide_logits(x, self._weight, self._decoder.biases_of_logits)
        return capped(logits, self._decoder.geometry.logit_cap)

    def keep(self, rows: Sequence[int]) -> None:
        self._caches = [(k[rows], v[rows]) for k, v in self._caches]

    def _inputs(self, positions: Tensor, write_indices: Tensor, mask: Tensor) -> Inputs:
        device = self._weight.device
        return Inputs(
            self._cos,
            self._sin,
            positions.to(device),
            write_indices.to(device),
            mask.to(self._weight),
        )

    def _normed(self, ids: Tensor, inputs: Inputs, caches: Sequence[KV]) -> Tensor:
        """Return the inputs of the LM head [B, n, hidden] for ids [B, n]. The caches are updated in
        place."""
        o = self._decoder.operations(inputs, caches)
        layers = o.model.geometry.num_layers
        x = after_layers(o, o.model, ids.to(self._weight.device), layers)
        return o.norm(x, o.model.final_norm)


def continue_prompts(
    writer: Writer, writing: Writing, advance: Callable[[int], None] = lambda _: None
) -> list[list[int]]:
    """Return each prompt with its continuation. ``advance`` is called with the number of texts that
    have been finished since its last call."""
    texts = [list(prompt) for prompt in writing.prompts]
    ended = 0
    for index, text in writer.texts(writing):
        texts[index] = text
        ended += 1
        advance(1)
    advance(len(texts) - ended)  # prompts without room for a token
    return texts


@torch.inference_mode()
def texts_of_rows(
    open_rows: Callable[[int, int], TextRows], writing: Writing
) -> Iterator[tuple[int, list[int]]]:
    """Yield the results of :meth:`Writer.texts`. This function chooses the tokens of the rows.

    Args:
        open_rows: A function that opens rows, given the number of rows and the maximum number of
            tokens in a text.
        writing: The prompts and their settings.
    """
    waiting = writing.waiting()
    limits = writing.limits
    if not waiting:
        return
    busy = [waiting.pop() for _ in range(min(writing.rows or len(waiting), len(waiting)))]
    batch = open_rows(len(busy), max(limits))
    texts = {index: list(writing.prompts[index]) for index in busy}
    random = {index: writing.random(index) for index in busy}
    begun = [*range(len(busy))]
    ended = set[int]()
    while len(ended) < len(busy):
        batch.prefill(begun, [texts[busy[row]][:-1] for row in begun])
        logits = batch.step(
            [texts[index][-1] for index in busy], [len(texts[index]) - 1 for index in busy]
        )
        uniforms = [
            own.random() if own and row not in ended else 0.0
            for row, own in enumerate(map(random.get, busy))
        ]
        begun = []
        for row, token in enumerate(
            chosen_tokens(logits, [writing.temperatures[index] for index in busy], uniforms)
        ):
            index = busy[row]
            if row in ended:
                continue
            texts[index].append(token)
            if token not in writing.eos_token_ids and len(texts[index]) < limits[index]:
                continue
            yield index, texts[index]
            if waiting:
                busy[row] = following = waiting.pop()
                texts[following] = list(writing.prompts[following])
                random[following] = writing.random(following)
                begun.append(row)
            else:
                ended.add(row)
        if len(ended) > batch.most_idle * len(busy):
            kept = [row for row in range(len(busy)) if row not in ended]
            batch.keep(kept)
            begun = [kept.index(row) for row in begun]
            busy = [busy[row] for row in kept]
            ended = set()


def padded(texts: Sequence[Sequence[int]], width: int) -> tuple[Tensor, Tensor]:
    """Return the texts as a tensor [N, width] (padded with 0), and their lengths [N]."""
    tokens = torch.zeros(len(texts), width, dtype=torch.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    return tokens, torch.tensor([len(text) for text in texts])


def chosen_tokens(
    logits: Tensor, temperatures: Sequence[float], uniforms: Sequence[float]
) -> list[int]:
    """Choose a token for each row [B] from logits [B, V]. At temperature 0, it is the most likely
    token. At other temperatures, it is sampled by inverting the cumulative distribution at a
    uniform random number (one for each row)."""
    best = logits.argmax(-1)
    warm = [row for row, temperature in enumerate(temperatures) if temperature]
    if warm:
        heat = torch.tensor([max(temperatures[row], 1e-4) for row in warm], device=logits.device)[
            :, None
        ]
        drawn = torch.tensor(
            [uniforms[row] for row in warm], dtype=torch.float64, device=logits.device
        )[:, None]
        best[warm] = _sampled(logits[warm], best[warm], heat, drawn)
    return best.tolist()


def _sampled(logits: Tensor, best: Tensor, heat: Tensor, drawn: Tensor) -> Tensor:
    """Return tokens [n] that are sampled from logits [n, V]. The arguments include the most likely
    tokens [n], the temperatures [n, 1] and uniform random numbers [n, 1]."""
    weights = ((logits - logits.gather(1, best[:, None])) / heat).exp()
    blocks = pad(weights, (0, -weights.shape[1] % BLOCK)).view(len(weights), -1, BLOCK)
    ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    drawn = drawn * ends[:, -1:]
    block = torch.searchsorted(ends, drawn, right=True).clamp_max(ends.shape[1] - 1)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0]
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp_min(0)), 0.0)
    within = torch.searchsorted(inside.cumsum(-1, dtype=torch.float64) + before, drawn, right=True)
    # The sums within the block may round to less than the block's total. The last token with a
    # nonzero probability is then chosen.
    last = (torch.arange(BLOCK, device=logits.device) * (inside > 0)).amax(-1, keepdim=True)
    return (block * BLOCK + torch.where(within < BLOCK, within, last))[:, 0]
