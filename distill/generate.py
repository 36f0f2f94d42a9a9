"""The model's own text: ragged prompts continued in one batch, and shards of such rows that a stopped run goes on with."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor

from eesd.common.errors import EESDError
from eesd.common.files import written_whole
from eesd.common.manifest import MASKED
from eesd.distill.data import taken
from eesd.distill.options import difference
from eesd.model.decoder import KV, Decoder, Inputs, causal_inputs, empty_caches, rotary_tables

GROWTH = 64
"""Attention sees as many slots as the text needs, rounded up to this."""


@dataclass(frozen=True)
class Generation:
    """How own text is made: ``rows`` rows of at most ``length`` + 1 tokens, ``batch`` at a time, at each of ``temperatures`` in
    turn; ``prompts`` is the digest of the prompts, ``base`` the fingerprint of the model."""

    rows: int
    batch: int
    length: int
    temperatures: tuple[float, ...]
    seed: int
    prompts: str
    base: str

    def __post_init__(self) -> None:
        if self.rows < 1 or self.batch < 1 or not self.temperatures or min(self.temperatures) < 0:
            raise EESDError("Self-generation needs at least one row, one row a batch, and temperatures of 0 or more.")


def _final(decoder: Decoder, ids: Tensor, inputs: Inputs, caches: list[KV]) -> Tensor:
    """What the LM head gets for ids [B, n]: [B, n, hidden]; the caches are written in place."""
    x = decoder.model.embed_tokens(ids)
    for block, cache in zip(decoder.model.layers, caches, strict=True):
        x, _ = block(x, inputs, cache)
    normed: Tensor = decoder.model.norm(x)
    return normed


@torch.inference_mode()
def continue_prompts(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    temperatures: Tensor,
    noise: torch.Generator,
    eos_token_ids: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Each prompt and its continuation as rows [B, longest + new_tokens], with their lengths [B].

    ``temperatures`` is [B]; 0 is greedy. A row ends with its first EOS.
    """
    geometry, weight = decoder.geometry, decoder.lm_head.weight
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    batch, longest = len(prompts), int(lengths.max())
    slots, every = longest + new_tokens, torch.arange(batch)
    tokens = torch.zeros(batch, slots, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    with torch.device(weight.device):
        caches = [
            (k.to(weight.dtype), v.to(weight.dtype)) for k, v in empty_caches(geometry, batch, slots, geometry.num_layers)
        ]
        inputs = causal_inputs(geometry, batch, longest, slots)
        cos, sin = (table.to(weight.dtype) for table in rotary_tables(geometry, slots))
    inputs.cos, inputs.sin, inputs.attn_mask = cos, sin, inputs.attn_mask.to(weight.dtype)
    final = _final(decoder, tokens[:, :longest].to(weight.device), inputs, caches)[every, lengths - 1]
    ends, alive = lengths + new_tokens, torch.ones(batch, dtype=torch.bool)
    for step in range(new_tokens):
        at = lengths + step
        tokens[every, at] = torch.where(alive, _choose(decoder.lm_head(final).float().cpu(), temperatures, noise), 0)
        ended = alive & torch.isin(tokens[every, at], torch.tensor(eos_token_ids, dtype=torch.int64))
        ends[ended], alive = at[ended] + 1, alive & ~ended
        if not alive.any() or step == new_tokens - 1:
            break
        seen = min(slots, -(-(longest + step + 1) // GROWTH) * GROWTH)
        mask = torch.where(torch.arange(seen) > at[:, None], MASKED, 0.0)[:, None, None].to(weight)
        place = at.to(weight.device)
        inputs = Inputs(cos, sin, place[:, None], place, mask)
        views = [(k[:, :, :seen], v[:, :, :seen]) for k, v in caches]
        final = _final(decoder, tokens[every, at][:, None].to(weight.device), inputs, views)[:, 0]
    return tokens, ends


def _choose(logits: Tensor, temperatures: Tensor, noise: torch.Generator) -> Tensor:
    """A token for each row of logits [B, V]: the likeliest, or one sampled with Gumbel noise."""
    gumbel = -torch.empty(logits.shape).exponential_(generator=noise).log()
    return (logits + temperatures[:, None] * gumbel).argmax(-1)


def shard_name(number: int) -> str:
    return f"shard-{number:05}.safetensors"


def self_generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    generation: Generation,
    directory: Path,
    eos_token_ids: Sequence[int],
    advance: Callable[[int], None],
    process: int = 0,
    processes: int = 1,
) -> None:
    """Write the shards that are not there yet; ``advance`` is told the number of rows that each brought.

    Shard i depends on the options and on i alone, so a stopped run goes on where it was, and processes share the work.
    """
    _check_same(directory, generation)
    for number, start in enumerate(range(0, generation.rows, generation.batch)):
        count = min(generation.batch, generation.rows - start)
        path = directory / shard_name(number)
        if number % processes == process and not path.exists():
            chosen = [prompts[i] for i in taken(len(prompts), start, count, generation.seed)]
            heat = torch.tensor([generation.temperatures[(start + i) % len(generation.temperatures)] for i in range(count)])
            noise = torch.Generator().manual_seed(generation.seed * 1_000_003 + number)
            new_tokens = generation.length + 1 - min(map(len, chosen))
            tokens, lengths = continue_prompts(decoder, chosen, new_tokens, heat, noise, eos_token_ids)
            shard = {
                "tokens": np.ascontiguousarray(tokens[:, : generation.length + 1].numpy().astype(np.int32)),
                "lengths": lengths.clamp_max(generation.length + 1).numpy(),
                "temperatures": heat.numpy(),
            }
            with written_whole(path) as temporary:
                save_file(shard, temporary)
        advance(count)


def _check_same(directory: Path, generation: Generation) -> None:
    """Refuse to go on with another run's shards."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "generation.json"
    options = json.loads(json.dumps(asdict(generation)))
    if path.exists():
        changed = difference(json.loads(path.read_text()), options)
        if changed:
            raise EESDError(
                f"{directory} holds text that was generated with other options ({changed}); give another directory."
            )
    with written_whole(path) as temporary:
        temporary.write_text(json.dumps(options, indent=2) + "\n")
