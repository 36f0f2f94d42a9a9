"""A model whose weights are split over ranks: tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053).

Each rank has some heads of every attention and some columns of every MLP, or of each expert, and so computes a part of what
both add to x. The parts are added in the order of the ranks: a result has the same bits whether the ranks are in one process or
in several. Embeddings, norms, routers and LM heads are on every rank.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from eesd.common.geometry import Geometry
from eesd.common.weights import INPUTS, OUTPUTS, split_side
from eesd.model.decoder import KV, Attention, Block, Decoder, Inputs
from eesd.model.deep_states import DeepState
from eesd.model.exit_head import ExitHead
from eesd.model.feed_forward import make_feed_forward

Add = Callable[[Sequence[Tensor]], Tensor]
"""Adds the parts of all ranks, given those of the ranks in this process, in the order of the ranks."""


def add_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Add parts, the first ones first. With all ranks in one process this is an :data:`Add`."""
    total, *others = parts
    for other in others:
        total = total + other
    return total


@dataclass(frozen=True)
class Split:
    """How weights are split.

    Attributes:
        ranks: Number of ranks.
        own: The ranks in this process.
        add: Adds the parts of all ranks.
    """

    ranks: int
    own: tuple[int, ...]
    add: Add = add_in_order

    def in_process(self, geometry: Geometry) -> Geometry:
        """What this process has of a model: the KV heads of its caches are those of its ranks."""
        one = geometry.on_rank(self.ranks)
        return replace(one, num_kv_heads=one.num_kv_heads * len(self.own), num_heads=one.num_heads * len(self.own))


Parts = dict[tuple[int, int], Tensor]
"""Copies of parts, by the address of what they are a part of, and the rank."""


def split_blocks(modules: Iterable[tuple[Decoder, ExitHead]], split: Split) -> None:
    """Replace attention and MLP in the blocks of models and exit heads by this process's parts. Of what they share, they share
    the parts.

    Layers whose weights are no parameters, but stay quantized, are the part of this process's only rank already.
    """
    parts: Parts = {}
    for decoder, head in modules:
        _split(decoder, head, split, parts)


def _split(decoder: Decoder, head: ExitHead, split: Split, parts: Parts) -> None:
    geometry = decoder.geometry
    layers = [(geometry.of_layer(layer), geometry.kind(layer)) for layer in range(geometry.num_layers)]
    exits = [(geometry.dense, kind) for kind in geometry.head_kinds(len(head.blocks))]
    for block, (of, kind) in zip((*decoder.model.layers, *head.blocks), (*layers, *exits), strict=True):
        assert isinstance(block, Block)
        if all(parameter.is_meta for parameter in block.parameters()):  # a draft has the first layers only
            continue
        one = of.on_rank(split.ranks)
        block.self_attn = SplitAttention(_parts_of(block.self_attn, partial(Attention, one, kind), split, parts), split.add)
        block.mlp = SplitFeedForward(_parts_of(block.mlp, partial(make_feed_forward, one), split, parts), split.add)
    for index, deep in enumerate(head.deep):
        assert isinstance(deep, DeepState)
        head.deep[index] = SplitDeepState(deep, split)
    if isinstance(head.deep_in_proj, nn.Linear):
        head.deep_in_proj = SplitInput(head.deep_in_proj.weight, split)


def _parts_of(whole: nn.Module, make: Callable[[], nn.Module], split: Split, made: Parts) -> nn.ModuleList:
    """The parts of a module in this process: views where they are contiguous, else copies that are in ``made`` or come into it.
    ``make`` makes the module of a rank, without values."""
    with torch.device("meta"):
        parts = nn.ModuleList(make() for _ in split.own)
    for rank, part in zip(split.own, parts, strict=True):
        for name, layer in list(part.named_modules()):
            if isinstance(layer, nn.Linear) and not isinstance(whole.get_submodule(name), nn.Linear):
                part.set_submodule(name, whole.get_submodule(name))
        state = {name: _part(name, value, rank, split.ranks, made) for name, value in whole.state_dict().items()}
        part.load_state_dict(state, assign=True)
    return parts.requires_grad_(False)


class SplitAttention(Attention):
    """The parts of an attention that are in this process. Its caches have the KV heads of these parts."""

    def __init__(self, parts: nn.ModuleList, add: Add) -> None:
        nn.Module.__init__(self)
        self.parts, self.add = parts, add

    def forward(self, x: Tensor, inputs: Inputs, cache: KV) -> tuple[Tensor, KV]:
        return self.add([part(x, inputs, own)[0] for part, own in self._with_caches(cache)]), cache

    def write_kv(self, x: Tensor, inputs: Inputs, cache: KV) -> KV:
        for part, own in self._with_caches(cache):
            assert isinstance(part, Attention)
            part.write_kv(x, inputs, own)
        return cache

    def _with_caches(self, cache: KV) -> list[tuple[nn.Module, KV]]:
        """Each part with its heads of the caches, which it writes in place."""
        count = len(self.parts)
        return list(zip(self.parts, zip(*(whole.chunk(count, 1) for whole in cache), strict=True), strict=True))


class SplitFeedForward(nn.Module):
    """The parts of an MLP, or of a mixture of them, that are in this process."""

    def __init__(self, parts: nn.ModuleList, add: Add) -> None:
        super().__init__()
        self.parts, self.add = parts, add

    def forward(self, x: Tensor) -> Tensor:
        return self.add([part(x) for part in self.parts])


def rank_part(block: Block) -> tuple[Block, Add]:
    """The block of the only rank in this process, and what adds its results. A block that is not split is its own part."""
    attention, mlp = block.self_attn, block.mlp
    if not (isinstance(attention, SplitAttention) and isinstance(mlp, SplitFeedForward)):
        return block, add_in_order
    part = Block.__new__(Block)
    nn.Module.__init__(part)
    [own], [part.mlp] = attention.parts, mlp.parts
    assert isinstance(own, Attention)
    part.self_attn = own
    part.input_layernorm, part.post_attention_layernorm = block.input_layernorm, block.post_attention_layernorm
    return part, attention.add


class SplitDeepState(DeepState):
    """What one deep layer adds to the KV heads of the deep state that are in this process."""

    def __init__(self, whole: DeepState, split: Split) -> None:
        nn.Module.__init__(self)
        self.norm = whole.norm
        self.parts = _parameters(_heads_of(whole.state_proj.weight, rank, split.ranks, 0) for rank in split.own)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        halves = [linear(normed, part).chunk(2, -1) for part in self.parts]
        return torch.cat([keys for keys, _ in halves] + [values for _, values in halves], -1)


class SplitInput(nn.Module):
    """The product of a deep state with a matrix, from the KV heads of each rank."""

    def __init__(self, weight: Tensor, split: Split) -> None:
        super().__init__()
        self.parts = _parameters(_heads_of(weight, rank, split.ranks, 1) for rank in split.own)
        self._add = split.add

    def forward(self, state: Tensor) -> Tensor:
        own = [_heads_of(state, index, len(self.parts), -1) for index in range(len(self.parts))]
        return self._add([linear(part, weight) for part, weight in zip(own, self.parts, strict=True)])


def _heads_of(value: Tensor, rank: int, ranks: int, dim: int) -> Tensor:
    """A rank's part of a dimension of 2 KV D: its heads of the keys, and of the values."""
    return torch.cat([half.chunk(ranks, dim)[rank] for half in value.chunk(2, dim)], dim)


def _parameters(values: Iterable[Tensor]) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(value, requires_grad=False) for value in values)


def _part(name: str, value: Tensor, rank: int, ranks: int, made: Parts) -> Tensor:
    """A rank's part of a parameter of an attention or an MLP. A bias behind a split input is the first rank's."""
    side = split_side(name)
    if side == OUTPUTS:
        return value.chunk(ranks, 0)[rank]
    if side == INPUTS and name.endswith("weight"):
        if value.is_meta:  # verify has only keys and values of the exit head's blocks
            return value.chunk(ranks, 1)[rank]
        key = (value.data_ptr(), rank)
        if key not in made:
            made[key] = value.chunk(ranks, 1)[rank].contiguous()
        return made[key]
    if side == INPUTS and rank:
        return torch.zeros_like(value)
    return value
