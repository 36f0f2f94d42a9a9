"""The exit head: predicts the next token from the hidden state after layer N.

It consists of E decoder blocks, a norm, and the base model's LM head or its own. With a draft
vocabulary it predicts only Vd of the V tokens. It is stored in a checkpoint of its own:
``exit_head_file.py``. Without blocks it has no caches: that is the early exit of models that were
trained for it (LayerSkip, arXiv 2404.16710).

A head may also know something of the deep layers. Verify has run all layers: it projects the states
after some of them to a *deep state*, 2 KV D numbers for each token, and writes it into the token's
slot of the deep cache, as if these were keys and values. A draft step reads the deep state of the
token before its first one, adds it, projected back, after the head's last attention, and copies it
into the slots of its own tokens. So all steps of a round read the deep state of the token before
the root, the last one that verify had seen, and need to be told nothing.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from eesd.common.architecture import (
    Model,
    attend_in_head,
    deep_in,
    deep_state,
    finish_head,
)
from eesd.common.errors import EESDError
from eesd.common.geometry import ExitConfig, Geometry, exit_caches, head_fault
from eesd.common.quantization import EXIT_HEAD, LM_HEAD
from eesd.common.weights import (
    DRAFT_VOCAB,
    FINAL_NORM,
    ROTARY_TABLES,
    block_shapes,
    exit_head_shapes,
    lm_head_name,
)
from eesd.model.decoder import add_modules
from eesd.model.rotary import rotary_tables
from eesd.model.torch_ops import KV, Inputs, TorchOperations

PARTS = ("blocks", "norm", "lm_head", "deep", "deep_in_proj", "fuse_norm", "fuse_proj")
"""The parts of a head, in the order of its parameters, in which a checkpoint of a training has the
state of its optimizers."""


class ExitHead(nn.Module):
    """The modules of an exit head, and what training computes with them. Each block has a pair of
    caches, like a base layer.

    Attributes:
        draft_vocab: Ids of the draft vocabulary [Vd], int64, ascending: column i of the logits is
            for the token with the i-th id. None: for token i.
    """

    blocks: nn.ModuleList
    lm_head: nn.Linear | None
    draft_vocab: Tensor | None

    def __init__(self, geometry: Geometry, exit_config: ExitConfig) -> None:
        super().__init__()
        self.geometry, self.exit_config = geometry, exit_config
        self.blocks = nn.ModuleList()
        shapes = exit_head_shapes(geometry, exit_config)
        columns = shapes.pop(DRAFT_VOCAB, None)
        ids = None if columns is None else torch.zeros(columns, dtype=torch.int64)
        self.register_buffer(DRAFT_VOCAB, ids)
        ordered = sorted(shapes, key=lambda name: PARTS.index(name.partition(".")[0]))
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
        return TorchOperations(self.described, self._module, inputs, dict(own))

    def _module(self, name: str) -> nn.Module:
        return self.get_submodule(name.removeprefix(EXIT_HEAD))

    def rows_of(self, lm_head: Tensor) -> Tensor:
        """The rows of an LM head's weight [V, hidden] that the head's logits are made from: those
        of the draft vocabulary."""
        return lm_head if self.draft_vocab is None else lm_head[self.draft_vocab]

    def tokens(self, columns: Tensor) -> Tensor:
        """Token ids for columns of the logits."""
        if self.draft_vocab is None:
            return columns
        return self.draft_vocab[columns]

    def columns(self, tokens: Tensor) -> Tensor:
        """Columns of the logits for token ids; -1 for tokens that the draft vocabulary does not
        have."""
        if self.draft_vocab is None:
            return tokens
        columns = torch.searchsorted(self.draft_vocab, tokens.long().contiguous()).clamp_max(
            len(self.draft_vocab) - 1
        )
        return torch.where(self.draft_vocab[columns] == tokens, columns, -1)

    def lm_head_input(
        self, x: Tensor, inputs: Inputs, caches: Sequence[KV], state: Tensor | None = None
    ) -> Tensor:
        """Run blocks and norm: the input of the LM head [B, n, hidden], for the hidden state x
        [B, n, hidden] after layer N.

        With deep layers, ``state`` [B, n, 2 KV D], or [B, 1, 2 KV D], is the deep state before each
        token's root. It is added behind the last attention, so no key or value depends on it:
        verify, which does not know it, writes the same ones.
        """
        return self.finish(self.attend(x, inputs, caches), state)

    def attend(self, x: Tensor, inputs: Inputs, caches: Sequence[KV]) -> Tensor:
        """Run all that needs the other tokens: up to behind the last attention, for x
        [B, n, hidden]. ``caches`` are those of the blocks."""
        return attend_in_head(self._operations(inputs, caches), self.described, x)

    def finish(self, x: Tensor, state: Tensor | None) -> Tensor:
        """Run the rest, for each token alone: x and the deep state before its root, both with the
        same leading dimensions."""
        o = self._operations()
        if state is not None:
            x = o.add([x], deep_in(o, o.model, state), "")
        return o.norm(finish_head(o, o.model, x), o.model.head_norm("norm"))

    def deep_states(self, hidden: Sequence[Tensor]) -> Tensor:
        """The deep states [B, n, 2 KV D] of tokens, from their hidden states after each deep layer,
        each [B, n, hidden]."""
        return deep_state(self._operations(), self.described, hidden)


def make_head(geometry: Geometry, exit_config: ExitConfig, slots: int) -> ExitHead:
    """The modules of a head, without values. One of EAGLE-3 has rotary tables of its own
    [S, D/2], float32, for S = ``slots``."""
    head = ExitHead(geometry, exit_config)
    if exit_config.eagle:
        tables = rotary_tables(exit_config.eagle.block, slots)
        for name, table in zip(ROTARY_TABLES, tables, strict=True):
            head.register_buffer(name, table)
    return head


def check_exit(geometry: Geometry, exit_config: ExitConfig) -> None:
    """Raise :class:`EESDError` unless a model of this geometry can have such an exit head."""
    layer, blocks = exit_config.layer, exit_config.blocks
    if exit_config.is_whole(geometry):
        return
    if geometry.num_layers < 2:
        raise EESDError("This model has 1 layer, and an exit head needs a model of at least 2.")
    if not 1 <= layer < geometry.num_layers:
        raise EESDError(
            f"The exit layer must be between 1 and {geometry.num_layers - 1} for this "
            f"{geometry.num_layers}-layer model; "
            f"{layer} was given."
        )
    if not 0 <= blocks <= geometry.num_layers:
        raise EESDError(
            f"The exit head must have between 0 and {geometry.num_layers} blocks; {blocks} "
            "were given."
        )
    if fault := head_fault(geometry, exit_config):
        raise EESDError(
            "The exit head cannot have the deep layers "
            f"{', '.join(map(str, exit_config.deep))}: {fault}."
        )


def initial_names(geometry: Geometry, exit_config: ExitConfig) -> dict[str, tuple[str, ...]]:
    """Names of the base parameters that an untrained head starts from, by the names of the head's
    parameters; of several, :func:`joined` makes one.

    The blocks start from the last E layers, the norm from the final norm, and an own LM head from
    the base model's. A block's MLP starts from as many experts of its layer as it has room for.
    """
    names: dict[str, tuple[str, ...]] = {"norm.weight": (FINAL_NORM,)}
    if exit_config.own_lm_head:
        names[LM_HEAD] = (lm_head_name(geometry),)
    for index in range(exit_config.blocks):
        layer = geometry.num_layers - exit_config.blocks + index
        experts = geometry.of_layer(layer).experts
        for name in block_shapes(geometry.dense):
            parts = [name]
            if experts is not None and name.startswith("mlp."):
                count = min(experts.count, -(-geometry.intermediate_size // experts.size))
                parts = [name.replace("mlp.", f"mlp.experts.{expert}.") for expert in range(count)]
            names[f"blocks.{index}.{name}"] = tuple(
                f"model.layers.{layer}.{part}" for part in parts
            )
    return names


def joined(name: str, parts: Sequence[Tensor], geometry: Geometry) -> Tensor:
    """A parameter of a head from the base parameters that :func:`initial_names` says.

    Those of several experts stand side by side, as if a token used all of them with the same
    weight. What is too much is left out, and what is missing is 0, which adds nothing.
    """
    block = block_shapes(geometry.dense)
    shape = block.get(name.partition(".")[2].partition(".")[2])
    if shape is None or (len(parts) == 1 and parts[0].shape == shape):
        return parts[0]
    inner = 1 if name.endswith("down_proj.weight") else 0
    whole = torch.cat(list(parts), inner).narrow(
        inner, 0, min(shape[inner], sum(part.shape[inner] for part in parts))
    )
    found = whole.new_zeros(shape)
    found.narrow(inner, 0, whole.shape[inner]).copy_(whole / len(parts) if inner else whole)
    return found


def initial_head(
    geometry: Geometry,
    exit_config: ExitConfig,
    base: Mapping[str, Tensor],
    draft_vocab: Tensor | None = None,
) -> ExitHead:
    """Create an untrained head from the base parameters ``base``, by the names that
    :func:`initial_names` says.

    ``draft_vocab`` holds the ids of the draft vocabulary [Vd], ascending.
    """
    names = initial_names(geometry, exit_config)
    state = {
        name: joined(name, [base[source] for source in sources], geometry)
        for name, sources in names.items()
    }
    head = ExitHead(geometry, exit_config)
    if draft_vocab is not None:
        state[DRAFT_VOCAB] = draft_vocab
        state |= {LM_HEAD: state[LM_HEAD][draft_vocab]} if exit_config.own_lm_head else {}
    if exit_config.deep:
        state |= _initial_deep(geometry, len(exit_config.deep))
    head.load_state_dict(state)
    return head


def _initial_deep(geometry: Geometry, count: int) -> dict[str, Tensor]:
    """Random projections to the deep state, and one from it that adds nothing yet."""
    hidden, width = geometry.hidden_size, 2 * geometry.num_kv_heads * geometry.head_dim
    generator, found = (
        torch.Generator().manual_seed(0),
        {"deep_in_proj.weight": torch.zeros(hidden, width)},
    )
    for index in range(count):
        found[f"deep.{index}.norm.weight"] = torch.ones(hidden)
        found[f"deep.{index}.state_proj.weight"] = (
            torch.randn(width, hidden, generator=generator) / (hidden * count) ** 0.5
        )
    return found
