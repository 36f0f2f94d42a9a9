"""Rounding to 4 bits that knows the inputs of each layer (``--round-on``): a text goes through the
model, block after block.

A block's inputs come from the blocks before with their rounded weights (``compensation.py``). One
block is in memory at a time. Its levels lie in a file until the export is complete: verify, the
draft and the checks read them in orders of their own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from eesd.common.errors import EESDError
from eesd.common.files import temporary_beside
from eesd.common.json_input import read_text
from eesd.common.quantization import PACKED, is_linear
from eesd.common.weights import EMBEDDINGS, StoredWeight, layer_shapes, stored_weight
from eesd.export.compensation import compensation, one_thread_each, quantize_for
from eesd.export.onnx_graph import ExportOptions
from eesd.export.weights import RoundedTensor, own_levels
from eesd.model.arrays import to_float32
from eesd.model.as_torch import as_torch
from eesd.model.checkpoint import Checkpoint
from eesd.model.decoder import Block, Embeddings, Inputs
from eesd.model.inputs import causal_inputs
from eesd.model.quantized import Quantized, dequantize
from eesd.model.tokenizer_files import resolved_tokenizer

LEAST_TOKENS, MOST_TOKENS = 4096, 16384
"""Tokens of the text that the rounding needs, and that it reads."""
ROW = 512
"""Tokens that see each other."""
TOGETHER = 8
"""Rows that run together."""


@contextmanager
def rounded_on(
    text: Path,
    checkpoint: Checkpoint,
    layers: int,
    options: ExportOptions,
    output: Path,
    say: Callable[[int, int], None],
) -> Iterator[Checkpoint]:
    """The checkpoint with levels for weights of 4 bits that fit a text. They are readable within
    the block.

    Args:
        text: The text file.
        checkpoint: The base model.
        layers: Base layers of the draft.
        options: Options of the export.
        output: What the export writes; the levels lie beside it meanwhile.
        say: Called with the number of each layer and their count.

    Raises:
        EESDError: No weight gets 4 bits, or the text cannot be read, is too short, or has no tokens
            of the model.
    """
    passes = [
        found for draft in (False, True) if (found := _to_round(checkpoint, layers, options, draft))
    ]
    if options.link_weights or not passes:
        raise EESDError(
            "--round-on is for weights that are rounded to 4 bits and not linked; give "
            "--quantize int4, or leave it out."
        )
    rows = _rows(checkpoint, read_text(text, "give a text file"), text)
    output.parent.mkdir(parents=True, exist_ok=True)
    rounded = copy(checkpoint)
    rounded.tensors = dict(checkpoint.tensors)
    with temporary_beside(output) as directory:
        directory.mkdir()
        for number, weights in enumerate(passes):
            _round(rounded, weights, rows, directory / str(number), say)
        yield rounded


def _to_round(
    checkpoint: Checkpoint, layers: int, options: ExportOptions, draft: bool
) -> dict[str, StoredWeight]:
    """The weights of base layers that verify, or the draft as copies of its own, has in 4 bits, by
    their names there."""
    found, quantization = {}, options.quantization
    for name, shape in layer_shapes(
        checkpoint.geometry, range(layers if draft else checkpoint.geometry.num_layers)
    ).items():
        own = quantization.draft_name(name, shape, options.dtype) if draft else name
        if not is_linear(name) or (draft and own == name):
            continue
        weight = stored_weight(own, shape, options.dtype, quantization)
        of = weight.quantization
        if (
            of is not None
            and of.weights in ("int4", "uint4")
            and name not in quantization.tensors
            and not of.zero_points
        ):
            found[name] = weight
    return found


def _rows(checkpoint: Checkpoint, text: str, path: Path) -> list[Tensor]:
    """Token ids of parts of a text, spread over all of it, [rows, tokens] each. A row begins as a
    prompt does."""
    tokenizer = resolved_tokenizer(checkpoint.path).get("tokenizer.json")
    if tokenizer is None:
        raise EESDError(
            "--round-on needs the model's tokenizer, and it has none; leave the option out."
        )
    coded = Tokenizer.from_str(tokenizer.decode())
    before, ids = coded.encode("").ids, coded.encode(text, add_special_tokens=False).ids
    if max(ids, default=0) >= checkpoint.geometry.vocab_size:
        raise EESDError(f"{path} has tokens that the model does not have; give another text.")
    length = min(ROW, checkpoint.config.max_positions) - len(before)
    if len(ids) < max(LEAST_TOKENS, length):
        raise EESDError(
            f"{path} has {len(ids)} tokens, and rounding needs at least {LEAST_TOKENS}; give "
            "a longer text."
        )
    there = len(ids) // length
    count = min(there, MOST_TOKENS // ROW)
    starts = [index * there // count * length for index in range(count)]
    rows = torch.tensor([[*before, *ids[start : start + length]] for start in starts])
    return list(torch.split(rows, TOGETHER))


@torch.no_grad()
def _round(
    checkpoint: Checkpoint,
    weights: dict[str, StoredWeight],
    rows: Sequence[Tensor],
    files: Path,
    say: Callable[[int, int], None],
) -> None:
    """Round weights layer after layer, and put tensors with their levels into the checkpoint."""
    geometry = checkpoint.geometry
    with torch.device("meta"):
        table = Embeddings(geometry)
    table.load_state_dict({"weight": as_torch(checkpoint.tensors[EMBEDDINGS].read())}, assign=True)
    states, inputs = (
        [table(part).float() for part in rows],
        [_inputs(checkpoint, part) for part in rows],
    )
    del table  # which is large
    layers = 1 + max(int(name.split(".")[2]) for name in weights)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        with torch.device("meta"):
            block = Block(geometry.of_layer(layer), geometry.kind(layer)).eval()
        values = {
            name: to_float32(checkpoint.tensors[prefix + name].read())
            for name in block.state_dict()
        }
        block.load_state_dict(
            {name: as_torch(value) for name, value in values.items()}, assign=True
        )
        wanted = {name: weight for name, weight in weights.items() if name.startswith(prefix)}
        wanted = {
            name: weight
            for name, weight in wanted.items()
            if own_levels(checkpoint.tensors[name], weight) is None
        }
        products = _products(
            block, {_first_reader(name) for name in wanted}, prefix, states, inputs
        )
        levels = _round_block(
            block, wanted, prefix, {name: compensation(one) for name, one in products.items()}
        )
        del products
        with files.with_name(f"{files.name}-{layer}").open("wb") as file:
            for name, weight in wanted.items():
                assert weight.quantization is not None
                stored = checkpoint.tensors[name]
                checkpoint.tensors[name] = RoundedTensor.of(
                    stored, weight.quantization, levels[name], file
                )
        states = _run(block, states, inputs)
        say(layer + 1, layers)


def _round_block(
    block: Block, weights: dict[str, StoredWeight], prefix: str, factors: dict[str, Tensor]
) -> dict[str, Quantized]:
    """Round the weights of a block, each in a thread. The block has their values then."""

    @torch.no_grad()
    def levels(name: str) -> Quantized:
        of, module = weights[name], _module(block, name, prefix)
        assert of.quantization is not None
        kind = of.quantization.weights
        found = quantize_for(factors[_first_reader(name)], module.weight, kind, of.scales_dtype)
        module.weight = nn.Parameter(as_torch(dequantize(found, kind).T), requires_grad=False)
        return found

    with one_thread_each() as pool:
        return dict(zip(weights, pool.map(levels, weights), strict=True))


def _inputs(checkpoint: Checkpoint, ids: Tensor) -> Inputs:
    """Inputs of whole rows [rows, tokens]."""
    return replace(
        causal_inputs(checkpoint.geometry, len(ids), ids.shape[1], ids.shape[1]), whole=True
    )


def _run(block: Block, states: Sequence[Tensor], inputs: Sequence[Inputs]) -> list[Tensor]:
    """What a block makes of states [rows, tokens, hidden]."""
    unused = torch.empty(0), torch.empty(0)
    return [block(x, of, unused)[0] for x, of in zip(states, inputs, strict=True)]


def _products(
    block: Block, names: set[str], prefix: str, states: Sequence[Tensor], inputs: Sequence[Inputs]
) -> dict[str, Tensor]:
    """The sum of x x^T over the inputs x of some linear layers, by the names of their weights."""
    found: dict[str, Tensor] = {}

    def add(name: str, _: nn.Module, given: tuple[Tensor, ...]) -> None:
        x = given[0].flatten(0, -2)
        found[name].addmm_(x.t(), x)

    hooks = []
    for name in names:
        module = _module(block, name, prefix)
        found[name] = torch.zeros(module.in_features, module.in_features)
        hooks.append(module.register_forward_pre_hook(partial(add, name)))
    _run(block, states, inputs)
    for hook in hooks:
        hook.remove()
    return found


def _module(block: Block, name: str, prefix: str) -> nn.Linear:
    module = block.get_submodule(name.removeprefix(prefix).removesuffix(".weight"))
    assert isinstance(module, nn.Linear)
    return module


def _first_reader(name: str) -> str:
    """The first of the weights that read the same input."""
    readers = {part: parts[0] for parts in reversed(PACKED.values()) for part in parts}
    return next(
        (name.replace(part, first) for part, first in readers.items() if part in name), name
    )
