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
from torch.nn.functional import linear

from eesd.common.errors import EESDError
from eesd.common.geometry import ExitConfig, Geometry, draft_columns, head_fault
from eesd.common.quantization import LM_HEAD
from eesd.common.weights import DRAFT_VOCAB, FINAL_NORM, block_shapes, lm_head_name
from eesd.model.decoder import KV, Block, Inputs, make_norm, write_cache


class DeepState(nn.Module):
    """What one deep layer adds to the deep state."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.norm = make_norm(geometry)
        self.state_proj = nn.Linear(
            geometry.hidden_size, 2 * geometry.num_kv_heads * geometry.head_dim, bias=False
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, n, 2 KV D] for the hidden state x [B, n, hidden] after the layer."""
        state: Tensor = self.state_proj(self.norm(x))
        return state


def deep_states(projections: nn.ModuleList, hidden: Sequence[Tensor]) -> Tensor:
    """The deep states [B, n, 2 KV D] of tokens, from their hidden states after each deep layer,
    each [B, n, hidden]."""
    state: Tensor
    state, *others = [project(x) for project, x in zip(projections, hidden, strict=True)]
    for other in others:
        state = state + other
    return state


def write_states(states: Tensor, inputs: Inputs, caches: Sequence[KV]) -> list[KV]:
    """Write states [B, n, 2 C KV D] of tokens into their slots of C caches: keys, then values, of
    one cache after another."""
    kv_heads, size = caches[0][0].shape[1], caches[0][0].shape[3]
    parts = torch.split(states.view(*states.shape[:2], -1, size).transpose(1, 2), kv_heads, 1)
    tensors = [tensor for cache in caches for tensor in cache]
    written = [
        write_cache(tensor, part, inputs.write_indices)
        for tensor, part in zip(tensors, parts, strict=True)
    ]
    return list(zip(written[::2], written[1::2], strict=True))


def carry_deep_states(inputs: Inputs, cache: KV) -> tuple[Tensor, KV]:
    """Read the deep state before the first of n tokens, and copy it into their slots.

    Returns:
        The deep state [B, 1, 2 KV D], zero where there is no token before, and the written caches.
    """
    is_there = inputs.write_indices > 0
    before = (inputs.write_indices - is_there.long())[:, None, None, None]
    is_there = is_there.to(cache[0].dtype)[:, None, None, None]
    found = [
        torch.gather(part, 2, before.expand(-1, part.shape[1], 1, part.shape[3])) * is_there
        for part in cache
    ]
    every = (inputs.position_ids * 0).to(cache[0].dtype)[:, None, :, None]  # [B, 1, n, 1]
    keys, values = (
        write_cache(part, one + every, inputs.write_indices)
        for part, one in zip(cache, found, strict=True)
    )
    return torch.cat(found, 1).transpose(1, 2).flatten(2), (keys, values)


class ExitHead(nn.Module):
    """The modules of an exit head. Each block has a pair of caches, like a base layer.

    Attributes:
        draft_vocab: Ids of the draft vocabulary [Vd], int64, ascending: column i of the logits is
            for the token with the i-th id. None: for token i.
    """

    draft_vocab: Tensor | None

    def __init__(self, geometry: Geometry, exit_config: ExitConfig) -> None:
        super().__init__()
        self.exit_config = exit_config
        self.blocks = nn.ModuleList(
            Block(geometry.dense, kind) for kind in geometry.head_kinds(exit_config.blocks)
        )
        self.norm = make_norm(geometry)
        columns = draft_columns(geometry, exit_config)
        self.lm_head = (
            nn.Linear(geometry.hidden_size, columns, bias=False)
            if exit_config.own_lm_head
            else None
        )
        ids = (
            torch.zeros(exit_config.draft_vocab, dtype=torch.int64)
            if exit_config.draft_vocab
            else None
        )
        self.register_buffer(DRAFT_VOCAB, ids)
        self.deep = nn.ModuleList(DeepState(geometry) for _ in exit_config.deep)
        width = 2 * geometry.num_kv_heads * geometry.head_dim
        self.deep_in_proj: nn.Module | None = (
            nn.Linear(width, geometry.hidden_size, bias=False) if exit_config.deep else None
        )

    def forward(
        self, x: Tensor, inputs: Inputs, caches: list[KV], lm_head: nn.Linear
    ) -> tuple[Tensor, list[KV]]:
        """Predict from the hidden state x [B, n, hidden] after layer N, with the caches of the
        head.

        ``lm_head`` is the base model's; a head with its own does not use it. Returns logits
        [B, n, V], with a draft vocabulary [B, n, Vd], and the written caches.
        """
        state, carried = None, []
        if self.exit_config.deep:
            state, cache = carry_deep_states(inputs, caches[-1])
            carried.append(cache)
        x, written = self.lm_head_input(x, inputs, caches[: len(self.blocks)], state)
        if self.lm_head is not None:
            return self.lm_head(x), written + carried
        if self.draft_vocab is None:
            return lm_head(x), written + carried
        return linear(x, self.rows_of(lm_head.weight)), written + carried

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
        self, x: Tensor, inputs: Inputs, caches: list[KV], state: Tensor | None = None
    ) -> tuple[Tensor, list[KV]]:
        """Run blocks and norm. Returns the input of the LM head [B, n, hidden] and the written
        caches.

        With deep layers, ``state`` [B, n, 2 KV D], or [B, 1, 2 KV D], is the deep state before each
        token's root. It is added behind the last attention, so no key or value depends on it:
        verify, which does not know it, writes the same ones.
        """
        x, written = self.attend(x, inputs, caches)
        return self.finish(x, state), written

    def attend(self, x: Tensor, inputs: Inputs, caches: list[KV]) -> tuple[Tensor, list[KV]]:
        """Run all that needs the other tokens: up to behind the last attention, for x
        [B, n, hidden]."""
        if not self.blocks:
            return x, []
        written = []
        for block, cache in zip(self.blocks[:-1], caches[:-1], strict=True):
            x, cache = block(x, inputs, cache)
            written.append(cache)
        x, cache = self._last.attend(x, inputs, caches[-1])
        return x, [*written, cache]

    def finish(self, x: Tensor, state: Tensor | None) -> Tensor:
        """Run the rest, for each token alone: x and the deep state before its root, both with the
        same leading dimensions."""
        if self.deep_in_proj is not None and state is not None:
            x = x + self.deep_in_proj(state)
        features: Tensor = self.norm(self._last.feed_forward(x) if self.blocks else x)
        return features

    @property
    def _last(self) -> Block:
        last = self.blocks[-1]
        assert isinstance(last, Block)
        return last

    def write_kv(self, x: Tensor, inputs: Inputs, caches: list[KV]) -> list[KV]:
        """Write the caches of all blocks for x [B, n, hidden], without predicting.

        The first E - 1 blocks run; the last one only computes its keys and values. The verify pass
        calls this with its hidden state after layer N, so that the draft finds filled caches.
        """
        if not self.blocks:
            return []
        written = []
        for block, cache in zip(self.blocks[:-1], caches[:-1], strict=True):
            x, cache = block(x, inputs, cache)
            written.append(cache)
        return [*written, self._last.write_kv(x, inputs, caches[-1])]

    def write_states(
        self, embedded: Tensor, hidden: Sequence[Tensor], inputs: Inputs, caches: list[KV]
    ) -> list[KV]:
        """Write what verify knows of the layers that the head reads: here the deep cache. Verify
        calls this.

        Args:
            embedded: The embeddings of the tokens [B, n, hidden], for heads that read them.
            hidden: Their states after each of the layers, [B, n, hidden].
            inputs: Shared inputs.
            caches: The head's caches that are not written yet.
        """
        return write_states(deep_states(self.deep, hidden), inputs, caches[-1:])


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
