"""Round weights to 4 bits by each layer's inputs (``--round-on``). A text goes through the model,
block by block.

A block's inputs are the outputs of the previous blocks, whose weights are already rounded
(``compensation.py``). One block is in memory at a time. Its levels stay in a file until the export
is complete, because the verify graph, the draft graph and the checks read them in different orders.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from eesd.common.architecture import Block, Linear, Model, block
from eesd.common.errors import EESDError
from eesd.common.files import temporary_beside
from eesd.common.json_input import read_text
from eesd.common.quantization import PACKED, Shape, is_linear
from eesd.common.shapes import NO_HEAD, block_weights
from eesd.common.weights import EMBEDDINGS, StoredWeight, layer_shapes, model_shapes, stored_weight
from eesd.export.compensation import compensation, one_thread_each, quantize_for
from eesd.export.onnx_graph import ExportOptions
from eesd.export.weights import RoundedTensor, own_levels
from eesd.model.as_torch import as_torch
from eesd.model.checkpoint import Checkpoint
from eesd.model.decoder import add_modules
from eesd.model.inputs import causal_inputs
from eesd.model.quantized import Quantized, dequantize
from eesd.model.tokenizer_files import resolved_tokenizer
from eesd.model.torch_ops import Inputs, TorchOperations

LEAST_TOKENS = 4096
MOST_TOKENS = 16384
"""Minimum and maximum number of tokens that the rounding reads."""
ROW = 512
"""Number of tokens in a row. The tokens of a row attend only to each other."""
TOGETHER = 8
"""Number of rows that run together."""


@contextmanager
def rounded_on(
    text: Path,
    checkpoint: Checkpoint,
    layers: int,
    options: ExportOptions,
    output: Path,
    say: Callable[[int, int], None],
) -> Iterator[Checkpoint]:
    """Yields the checkpoint, in which 4-bit levels of its weights were chosen for a text. The
    levels are readable within the ``with`` block.

    Args:
        text: The text file.
        checkpoint: The base model.
        layers: Base layers of the draft.
        options: Options of the export.
        output: Output of the export. The levels are stored next to it until the block ends.
        say: Called with the number of each layer and the number of layers.

    Raises:
        EESDError: No weight gets 4 bits, or the text cannot be read, is too short, or has tokens
            that the model lacks.
    """
    passes = [
        found for draft in (False, True) if (found := _to_round(checkpoint, layers, options, draft))
    ]
    if not checkpoint.geometry.has_stages:
        raise EESDError(
            f"--round-on cannot be used with {checkpoint.geometry.architecture}, whose layers "
            "share keys and values, or read the tokens; leave it out."
        )
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
    """Returns the weights of base layers that get 4 bits in the verify graph or in the draft's
    copies. Their names are those of the verify graph."""
    found = {}
    quantization = options.quantization
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
    """Returns token ids of parts that are spread over the text. Each has the shape [rows, tokens].
    Each row begins like a prompt."""
    tokenizer = resolved_tokenizer(checkpoint.path).get("tokenizer.json")
    if tokenizer is None:
        raise EESDError(
            "--round-on needs the model's tokenizer, and it has none; leave the option out."
        )
    coded = Tokenizer.from_str(tokenizer.decode())
    before = coded.encode("").ids
    ids = coded.encode(text, add_special_tokens=False).ids
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
    model = Model(checkpoint.geometry, NO_HEAD)
    shapes = (part.shape for part in rows)
    inputs = [replace(causal_inputs(model.geometry, b, n, n), whole=True) for b, n in shapes]
    states = _embedded(checkpoint, model, rows)
    layers = 1 + max(int(name.split(".")[2]) for name in weights)
    for layer in range(layers):
        of = model.layer(layer)
        root = _modules(checkpoint, block_weights(of)).float()
        wanted = {
            name: weight
            for name, weight in weights.items()
            if name.startswith(of.prefix) and own_levels(checkpoint.tensors[name], weight) is None
        }
        sizes = {name: root.get_parameter(name).shape[1] for name in map(_first_reader, wanted)}
        sums = {name: torch.zeros(size, size) for name, size in sizes.items()}
        _run(_Recording(model, root.get_submodule, sums=sums), of, states, inputs)
        levels = _round_block(root, wanted, {name: compensation(one) for name, one in sums.items()})
        with files.with_name(f"{files.name}-{layer}").open("wb") as file:
            for name, weight in wanted.items():
                assert weight.quantization is not None
                stored = checkpoint.tensors[name]
                checkpoint.tensors[name] = RoundedTensor.of(
                    stored, weight.quantization, levels[name], file
                )
        states = _run(TorchOperations(model, root.get_submodule), of, states, inputs)
        say(layer + 1, layers)


@dataclass
class _Recording(TorchOperations):
    """Operations that record the inputs of some linear layers.

    Attributes:
        sums: Sums of x x^T over the inputs x, by the names of the weights. The caller provides zero
            matrices, and :meth:`linear` adds to them.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)

    def linear(self, x: Tensor, layers: Sequence[Linear]) -> Tensor:
        name = f"{layers[0].name}.weight"
        if name in self.sums:
            rows = x.flatten(0, -2)
            self.sums[name].addmm_(rows.t(), rows)
        return super().linear(x, layers)


def _modules(checkpoint: Checkpoint, shapes: Mapping[str, Shape]) -> nn.Module:
    """Modules that have weights of the checkpoint."""
    root = nn.Module()
    with torch.device("meta"):
        add_modules(root, shapes, checkpoint.geometry.wide_norms)
    state = {name: as_torch(checkpoint.tensors[name].read()) for name in shapes}
    root.load_state_dict(state, assign=True)
    return root


def _embedded(checkpoint: Checkpoint, model: Model, rows: Sequence[Tensor]) -> list[Tensor]:
    """The embeddings of token ids, in float32."""
    shape = model_shapes(checkpoint.geometry)[EMBEDDINGS]
    table = _modules(checkpoint, {EMBEDDINGS: shape})
    o = TorchOperations(model, table.get_submodule)
    return [o.embed(part, model.embeddings).float() for part in rows]


def _round_block(
    root: nn.Module, weights: dict[str, StoredWeight], factors: dict[str, Tensor]
) -> dict[str, Quantized]:
    """Round the weights of a block, each in a thread. Afterwards, the modules have the rounded
    values."""

    @torch.no_grad()
    def levels(name: str) -> Quantized:
        of = weights[name]
        module = root.get_submodule(name.removesuffix(".weight"))
        assert of.quantization is not None and isinstance(module, nn.Linear)
        kind = of.quantization.weights
        found = quantize_for(factors[_first_reader(name)], module.weight, kind, of.scales_dtype)
        module.weight = nn.Parameter(as_torch(dequantize(found, kind).T), requires_grad=False)
        return found

    with one_thread_each() as pool:
        return dict(zip(weights, pool.map(levels, weights), strict=True))


def _run(
    o: TorchOperations, of: Block, states: Sequence[Tensor], inputs: Sequence[Inputs]
) -> list[Tensor]:
    """The outputs of a block for states [rows, tokens, hidden]."""
    return [block(replace(o, inputs=rows), of, x) for x, rows in zip(states, inputs, strict=True)]


def _first_reader(name: str) -> str:
    """Name of the first weight that reads the same input as this one."""
    readers = {part: parts[0] for parts in reversed(PACKED.values()) for part in parts}
    return next(
        (name.replace(part, first) for part, first in readers.items() if part in name), name
    )
