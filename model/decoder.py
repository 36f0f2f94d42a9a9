"""The base model and its exit head as modules, which hold the parameters.

Parameters have the names of Llama's in a Hugging Face checkpoint, as in the description of the
model. Only the layers compute anything. ``common/architecture.py`` describes the blocks.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from eesd.common.architecture import (
    CHOICE_BIAS,
    EMBEDDING,
    INPUTS,
    LOGIT_BIAS,
    Model,
    Norm,
    attend_in_head,
    deep_in,
    deep_state,
    finish_head,
    verify,
)
from eesd.common.geometry import ExitConfig, Geometry, exit_caches
from eesd.common.quantization import EXIT_HEAD, Shape
from eesd.common.shapes import NO_HEAD, graph_needs
from eesd.common.weights import DRAFT_VOCAB, ROTARY_TABLES, exit_head_shapes
from eesd.model.rotary import rotary_tables
from eesd.model.torch_ops import KV, Inputs, TorchOperations

PARTS = ("blocks", "norm", "lm_head", "deep", "deep_in_proj", "fuse_norm", "fuse_proj")
"""The parts of a head in the order of its parameters. The optimizer states of training checkpoints
rely on this order."""


class Normalization(nn.Module):
    """A norm (RMSNorm or LayerNorm) whose statistics are computed in float32.

    Args:
        size: Number of values.
        wide: Whether the weight is float32 for any type of x. If so, only the product is rounded to
            the type of x.
        has_bias: Whether the norm adds a bias.
    """

    def __init__(self, size: int, wide: bool, has_bias: bool) -> None:
        super().__init__()
        dtype = torch.float32 if wide else None
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(size, dtype=dtype)) if has_bias else None
        self.wide = wide

    def forward(self, x: Tensor, norm: Norm) -> Tensor:
        """Normalize x."""
        if norm.groups > 1:
            apart = x.reshape(*x.shape[:-1], norm.groups, -1)
            return self.forward(apart, norm._replace(groups=1)).flatten(-2)
        wide = x.float()
        if norm.centred:
            return layer_norm(wide, x.shape[-1:], self.weight.float(), self._bias(), norm.eps).to(
                x.dtype
            )
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
        return (self.weight * wide).to(x.dtype) if self.wide else self.weight * wide.to(x.dtype)

    def _bias(self) -> Tensor | None:
        return None if self.bias is None else self.bias.float()


def add_modules(root: nn.Module, shapes: Mapping[str, Shape], wide: bool) -> None:
    """Add the layers with weights of these names and shapes, and the modules above them.

    ``wide`` applies to norms. Norms of queries and keys are added after their attention's products.
    """
    names = dict.fromkeys(name.rpartition(".")[0] for name in shapes)
    for name in sorted(names, key=lambda name: name.endswith(("q_norm", "k_norm"))):
        parts = name.split(".")
        parent = root
        for part, child in pairwise(parts):
            if not hasattr(parent, part):
                parent.add_module(part, nn.ModuleList() if child.isdigit() else nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(parts[-1], _layer(name, shapes, wide))


def _layer(name: str, shapes: Mapping[str, Shape], wide: bool) -> nn.Module:
    shape = shapes[f"{name}.weight"]
    if len(shape) == 1:
        wide = wide or name.endswith((CHOICE_BIAS, "factors"))
        return Normalization(shape[0], wide, f"{name}.bias" in shapes)
    if len(shape) == 3:
        return nn.Conv1d(shape[0], shape[0], shape[2], groups=shape[0], bias=False)
    if name in (EMBEDDING, INPUTS):
        return nn.Embedding(shape[0], shape[1])
    return nn.Linear(shape[1], shape[0], bias=f"{name}.bias" in shapes)


class Decoder(nn.Module):
    """The base model."""

    model: Any
    lm_head: nn.Linear
    logit_bias: nn.Module

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry
        needs = graph_needs(geometry, NO_HEAD, range(geometry.num_layers))
        add_modules(self, needs.weights, geometry.wide_norms)
        if geometry.tied_embeddings:
            self.lm_head.weight = self.get_parameter(f"{EMBEDDING}.weight")

    @property
    def biases_of_logits(self) -> Tensor | None:
        """The biases of the logits (float32), or None if the model has none."""
        if not self.geometry.logit_bias:
            return None
        return self.get_parameter(f"{LOGIT_BIAS}.weight").float()

    def operations(
        self, inputs: Inputs | None = None, caches: Sequence[KV] = ()
    ) -> TorchOperations:
        """Return the operations of a pass, with a pair of caches for each layer."""
        model = Model(self.geometry, NO_HEAD)
        return TorchOperations(model, self.get_submodule, inputs, dict(enumerate(caches)))

    def forward(
        self, input_ids: Tensor, inputs: Inputs, caches: Sequence[KV]
    ) -> tuple[Tensor, list[KV]]:
        """Run all layers on ``input_ids`` [B, n]. Returns logits [B, n, V] in float32 and the
        written caches."""
        o = self.operations(inputs, caches)
        logits = verify(o, o.model, input_ids, range(self.geometry.num_layers))
        return logits, [*o.caches.values()]


class ExitHead(nn.Module):
    """The modules of an exit head, and their computations for training. Each block has a pair of
    caches, like a base layer.

    Attributes:
        draft_vocab: Ids of the draft vocabulary ([Vd], int64, ascending). Column i of the logits
            belongs to the token with the i-th id. If it is None, column i belongs to token i.
            Loading the weights sets it.
    """

    blocks: nn.ModuleList
    lm_head: nn.Linear | None
    draft_vocab: Tensor | None

    def __init__(self, geometry: Geometry, exit_config: ExitConfig) -> None:
        super().__init__()
        self.geometry = geometry
        self.exit_config = exit_config
        self.blocks = nn.ModuleList()
        shapes = exit_head_shapes(geometry, exit_config)
        columns = shapes.pop(DRAFT_VOCAB, None)
        ids = None if columns is None else torch.zeros(columns, dtype=torch.int64)
        self.register_buffer(DRAFT_VOCAB, ids)
        needs = graph_needs(*self.described, None)  # the draft graph runs whole blocks
        names = dict.fromkeys((*(name.removeprefix(EXIT_HEAD) for name in needs.weights), *shapes))
        ordered = sorted(
            (name for name in names if name in shapes),
            key=lambda name: PARTS.index(name.partition(".")[0]),
        )
        add_modules(self, {name: shapes[name] for name in ordered}, geometry.wide_norms)
        if not exit_config.own_lm_head:
            self.lm_head = None

    @property
    def described(self) -> Model:
        """The description of the model with this head."""
        return Model(self.geometry, self.exit_config)

    def _operations(
        self, inputs: Inputs | None = None, caches: Sequence[KV] = ()
    ) -> TorchOperations:
        own = zip(exit_caches(*self.described), caches, strict=False)
        return TorchOperations(
            self.described,
            lambda name: self.get_submodule(name.removeprefix(EXIT_HEAD)),
            inputs,
            dict(own),
        )

    def rows_of(self, lm_head: Tensor) -> Tensor:
        """Return the rows of an LM head's weight [V, hidden] that give the head's logits. These are
        the rows of the draft vocabulary."""
        return lm_head if self.draft_vocab is None else lm_head[self.draft_vocab]

    def columns(self, tokens: Tensor) -> Tensor:
        """Return the columns of the logits for token ids. A token outside the draft vocabulary has
        the column -1."""
        if self.draft_vocab is None:
            return tokens
        columns = torch.searchsorted(self.draft_vocab, tokens.long().contiguous()).clamp_max(
            len(self.draft_vocab) - 1
        )
        return torch.where(self.draft_vocab[columns] == tokens, columns, -1)

    def lm_head_input(
        self, x: Tensor, inputs: Inputs, caches: Sequence[KV], state: Tensor | None = None
    ) -> Tensor:
        """Run the blocks and the norm on the hidden state x [B, n, hidden] after layer N. Returns
        the input of the LM head [B, n, hidden].

        If the head has deep layers, ``state`` ([B, n, 2 KV D] or [B, 1, 2 KV D]) is the deep state
        before each token's root. It is added after the last attention, so no key or value depends
        on it, and a verify pass writes the same keys and values without it.
        """
        return self.finish(self.attend(x, inputs, caches), state)

    def attend(self, x: Tensor, inputs: Inputs, caches: Sequence[KV]) -> Tensor:
        """Run the part that reads other tokens, up to the last attention, for x [B, n, hidden].
        ``caches`` are the caches of the blocks."""
        return attend_in_head(self._operations(inputs, caches), self.described, x)

    def finish(self, x: Tensor, state: Tensor | None) -> Tensor:
        """Run the rest of the head, for each token separately. ``x`` and ``state``, the deep state
        before the token's root, have the same leading dimensions."""
        o = self._operations()
        if state is not None:
            x = o.add([x], deep_in(o, o.model, state), "")
        return o.norm(finish_head(o, o.model, x), o.model.head_norm("norm"))

    def deep_states(self, hidden: Sequence[Tensor]) -> Tensor:
        """Return the deep states [B, n, 2 KV D] of tokens. ``hidden`` has their hidden states after
        each deep layer (each [B, n, hidden])."""
        return deep_state(self._operations(), self.described, hidden)


def make_head(geometry: Geometry, exit_config: ExitConfig, slots: int) -> ExitHead:
    """Return the modules of a head. Their parameters have no values yet. An EAGLE-3 head gets
    rotary tables [S, D/2] in float32, for S = ``slots``."""
    head = ExitHead(geometry, exit_config)
    if exit_config.eagle:
        tables = rotary_tables(exit_config.eagle.block, slots)
        for name, table in zip(ROTARY_TABLES, tables, strict=True):
            head.register_buffer(name, torch.tensor(table))
    return head
