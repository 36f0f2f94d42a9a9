"""A model whose weights are split over ranks: tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053).

Each rank has some heads of every attention and some columns of every MLP, and so computes a part of what both add to x. The
parts are added in the order of the ranks: a result has the same bits whether the ranks are in one process or in several.
Embeddings, norms and LM heads are on every rank.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from eesd.common.geometry import Geometry
from eesd.model.decoder import KV, Attention, Block, Decoder, Inputs
from eesd.model.deep_states import DeepState
from eesd.model.exit_head import ExitHead
from eesd.model.feed_forward import MLP

BY_INPUT = ("o_proj", "down_proj")
"""Linear layers whose inputs are split; of the others in attention and MLP the outputs are."""
BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
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
    """Replace the blocks of models and exit heads by this process's parts of them. Of what they share, they share the parts."""
    parts: Parts = {}
    for decoder, head in modules:
        _split(decoder, head, split, parts)


def _split(decoder: Decoder, head: ExitHead, split: Split, parts: Parts) -> None:
    for blocks in (decoder.model.layers, head.blocks):
        for index, block in enumerate(blocks):
            assert isinstance(block, Block)
            if not next(block.parameters()).is_meta:  # a draft has the first layers only
                blocks[index] = SplitBlock(block, decoder.geometry, split, parts)
    for index, deep in enumerate(head.deep):
        assert isinstance(deep, DeepState)
        head.deep[index] = SplitDeepState(deep, split)
    if isinstance(head.deep_in_proj, nn.Linear):
        head.deep_in_proj = SplitInput(head.deep_in_proj.weight, split)


class SplitBlock(Block):
    """The parts of a decoder block that are in this process. Its caches have the KV heads of these parts."""

    def __init__(self, block: Block, geometry: Geometry, split: Split, made: Parts) -> None:
        """Take the parts of ``block``: views where they are contiguous, else copies that are in ``made`` or come into it."""
        nn.Module.__init__(self)
        self.input_layernorm = block.input_layernorm
        self.post_attention_layernorm = block.post_attention_layernorm
        with torch.device("meta"):
            one = geometry.on_rank(split.ranks)
            self.attentions = nn.ModuleList(Attention(one) for _ in split.own)
            self.mlps = nn.ModuleList(MLP(one) for _ in split.own)
        self.add = split.add
        for whole, parts in ((block.self_attn, self.attentions), (block.mlp, self.mlps)):
            for rank, part in zip(split.own, parts, strict=True):
                state = {name: _part(name, value, rank, split.ranks, made) for name, value in whole.state_dict().items()}
                part.load_state_dict(state, assign=True)
        self.requires_grad_(False)

    @property
    def own_part(self) -> Block:
        """The part of the only rank in this process, as a block: what its attention and its MLP give is still to be added."""
        part = Block.__new__(Block)
        nn.Module.__init__(part)
        [attention], [mlp] = self.attentions, self.mlps
        assert isinstance(attention, Attention) and isinstance(mlp, MLP)
        part.self_attn, part.mlp = attention, mlp
        part.input_layernorm, part.post_attention_layernorm = self.input_layernorm, self.post_attention_layernorm
        return part

    def attend(self, x: Tensor, inputs: Inputs, cache: KV) -> tuple[Tensor, KV]:
        normed = self.input_layernorm(x)
        parts = [attention(normed, inputs, own)[0] for attention, own in self._with_caches(cache)]
        return x + self.add(parts), cache

    def feed_forward(self, x: Tensor) -> Tensor:
        normed = self.post_attention_layernorm(x)
        return x + self.add([mlp(normed) for mlp in self.mlps])

    def write_kv(self, x: Tensor, inputs: Inputs, cache: KV) -> KV:
        normed = self.input_layernorm(x)
        for attention, own in self._with_caches(cache):
            assert isinstance(attention, Attention)
            attention.write_kv(normed, inputs, own)
        return cache

    def _with_caches(self, cache: KV) -> list[tuple[nn.Module, KV]]:
        """Each part of the attention with its heads of the caches, which it writes in place."""
        count = len(self.attentions)
        return list(zip(self.attentions, zip(*(whole.chunk(count, 1) for whole in cache), strict=True), strict=True))


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
    layer, _, kind = name.rpartition(".")
    if layer in BY_OUTPUT:
        return value.chunk(ranks, 0)[rank]
    if layer in BY_INPUT and kind == "weight":
        if value.is_meta:  # verify has only keys and values of the exit head's blocks
            return value.chunk(ranks, 1)[rank]
        key = (value.data_ptr(), rank)
        if key not in made:
            made[key] = value.chunk(ranks, 1)[rank].contiguous()
        return made[key]
    if layer in BY_INPUT and rank:
        return torch.zeros_like(value)
    return value
