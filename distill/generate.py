"""Self-generated text: ragged prompts continued in one batch, and shards of such rows that a stopped run continues with."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from eesd.common.errors import EESDError
from eesd.common.files import written_whole
from eesd.common.json_input import read_json_object
from eesd.common.manifest import MASKED
from eesd.distill.data import shard_name, shuffled_indices
from eesd.distill.options import first_difference
from eesd.distill.stored import damaged, load_tensors, saving
from eesd.model.decoder import KV, Decoder, Inputs
from eesd.model.inputs import causal_inputs, empty_caches
from eesd.model.rotary import rotary_tables

SLOT_BUCKET = 64
"""Attention covers the slots in use, rounded up to a multiple of this number."""


@dataclass(frozen=True)
class GenerationOptions:
    """Options that determine the generated text. Stored as ``generation.json`` beside the shards.

    Attributes:
        rows: Number of rows.
        batch: Rows generated at a time; also the rows in a shard.
        length: Training positions in a row; a row has at most ``length`` + 1 tokens.
        temperatures: Temperatures of the rows, in turn. 0 is greedy.
        seed: Seed of the prompt order and of sampling.
        prompts: Digest of the prompts.
        base: Fingerprint of the model.
    """

    rows: int
    batch: int
    length: int
    temperatures: tuple[float, ...]
    seed: int
    prompts: str
    base: str

    def __post_init__(self) -> None:
        if self.rows < 1 or self.batch < 1 or not self.temperatures or min(self.temperatures) < 0:
            raise EESDError("--own-rows and --own-batch must be at least 1, and all --temperatures 0 or above.")


def _final_hidden(decoder: Decoder, ids: Tensor, inputs: Inputs, caches: list[KV]) -> Tensor:
    """Hidden states [B, n, hidden] after the final norm for ids [B, n]. Writes the KV caches in place."""
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
    generator: torch.Generator,
    eos_token_ids: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Continue all prompts in one batch.

    Args:
        decoder: The model.
        prompts: Token ids of each prompt; lengths may differ.
        new_tokens: Maximum number of tokens to append to each prompt. A row ends after its first EOS token.
        temperatures: Sampling temperature of each row [B]. 0 is greedy.
        generator: Source of the sampling noise.
        eos_token_ids: Tokens that end a row.

    Returns:
        Rows [B, longest prompt + new_tokens] of prompt and continuation, padded with 0, and their lengths [B].
    """
    geometry, weight = decoder.geometry, decoder.lm_head.weight
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    batch, longest = len(prompts), int(lengths.max())
    slots, rows = longest + new_tokens, torch.arange(batch)
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
    x = _final_hidden(decoder, tokens[:, :longest].to(weight.device), inputs, caches)[rows, lengths - 1]
    ends, alive = lengths + new_tokens, torch.ones(batch, dtype=torch.bool)
    for step in range(new_tokens):
        position = lengths + step
        sampled = _sample(decoder.lm_head(x).float().cpu(), temperatures, generator)
        tokens[rows, position] = torch.where(alive, sampled, 0)
        ended = alive & torch.isin(tokens[rows, position], torch.tensor(eos_token_ids, dtype=torch.int64))
        ends[ended], alive = position[ended] + 1, alive & ~ended
        if not alive.any() or step == new_tokens - 1:
            break
        used = min(slots, -(-(longest + step + 1) // SLOT_BUCKET) * SLOT_BUCKET)
        mask = torch.where(torch.arange(used) > position[:, None], MASKED, 0.0)[:, None, None].to(weight)
        write_indices = position.to(weight.device)
        inputs = Inputs(cos, sin, write_indices[:, None], write_indices, mask)
        views = [(k[:, :, :used], v[:, :, :used]) for k, v in caches]
        x = _final_hidden(decoder, tokens[rows, position][:, None].to(weight.device), inputs, views)[:, 0]
    return tokens, ends


def _sample(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """A token for each row of logits [B, V], sampled with Gumbel noise; greedy at temperature 0."""
    gumbel = -torch.empty(logits.shape).exponential_(generator=generator).log()
    return (logits + temperatures[:, None] * gumbel).argmax(-1)


def self_generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    directory: Path,
    eos_token_ids: Sequence[int],
    advance: Callable[[int], None],
    process: int = 0,
    processes: int = 1,
) -> None:
    """Write the shards that are missing.

    Each shard is a function of the options and of its number, so a stopped run continues where it stopped, and several
    processes share the work.

    Args:
        decoder: The model.
        prompts: Token ids of each prompt.
        options: Options of the text.
        directory: Directory of the shards.
        eos_token_ids: Tokens that end a row.
        advance: Called with the number of rows of each shard.
        process: Number of this process.
        processes: Number of processes that call this function.

    Raises:
        EESDError: The directory has text that was generated with other options.
    """
    _check_stored_options(directory, options)
    for number, start in enumerate(range(0, options.rows, options.batch)):
        count = min(options.batch, options.rows - start)
        path = directory / shard_name(number)
        if number % processes == process and not path.exists():
            chosen = [prompts[i] for i in shuffled_indices(len(prompts), start, count, options.seed)]
            temperatures = torch.tensor([options.temperatures[(start + i) % len(options.temperatures)] for i in range(count)])
            generator = torch.Generator().manual_seed(options.seed * 1_000_003 + number)
            new_tokens = options.length + 1 - min(map(len, chosen))
            tokens, lengths = continue_prompts(decoder, chosen, new_tokens, temperatures, generator, eos_token_ids)
            shard = {
                "tokens": tokens[:, : options.length + 1].int().contiguous(),
                "lengths": lengths.clamp_max(options.length + 1),
                "temperatures": temperatures,
            }
            with saving(path), written_whole(path) as temporary:
                save_file(shard, temporary)
        elif number % processes == process:
            _check_shard(path, count)
        advance(count)


def _check_shard(path: Path, count: int) -> None:
    """Raise :class:`EESDError` if an earlier run's shard does not have this number of rows."""
    shard = load_tensors(path)
    tokens, lengths = shard.get("tokens"), shard.get("lengths")
    if tokens is None or lengths is None or tokens.ndim != 2 or len(tokens) != count or lengths.shape != (count,):
        raise damaged(path)


def _check_stored_options(directory: Path, options: GenerationOptions) -> None:
    """Store the options beside the shards, or compare them with those of an earlier run."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "generation.json"
    entries = json.loads(json.dumps(asdict(options)))
    if path.exists():
        stored = read_json_object(path, f"delete {directory}, or give another --own-text")
        changed = first_difference(stored, entries)
        if changed:
            raise EESDError(f"{directory} has text generated with other options ({changed}); give another --own-text.")
    with saving(path), written_whole(path) as temporary:
        temporary.write_text(json.dumps(entries, indent=2) + "\n")
