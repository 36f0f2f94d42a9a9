"""The operations of the model in torch, over static KV caches. Training, checks and the torch
engine use them.

Each layer has a cache [B, KV, S, D] for keys and one for values. A pass writes the keys and values
of its ``n`` new tokens at ``write_indices``, and attention sees all S slots through an additive
mask [B, 1, n, S]. Positions and visibility are inputs, so the same pass serves a prompt, a single
token, a chain or a token tree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import (
    gelu,
    pad,
    relu,
    rms_norm,
    scaled_dot_product_attention,
    silu,
    softplus,
)

from eesd.common.architecture import (
    CLAMP,
    CLAMPED_SLOPE,
    DELTA_BIAS,
    DELTA_DECAY,
    DELTA_EPS,
    DELTA_NORM,
    DELTA_SKIP,
    DELTA_TAPS,
    DELTA_TAPS_BIAS,
    LOGIT_BIAS,
    SINKS,
    TAPS,
    XIELU,
    XIELU_LIMIT,
    XIELU_SLOPE,
    Block,
    Linear,
    Mixture,
    Model,
    Norm,
    Table,
)
from eesd.common.geometry import SLIDING, UNROTATED, Experts, Geometry, Latent
from eesd.common.manifest import MASKED
from eesd.common.quantization import EXIT_HEAD
from eesd.common.weights import INPUTS, split_side

EVEN_ROWS = 4
"""On the CPU, torch's float32 products add in a different order unless the number of rows is a
multiple of this. So rows are repeated if the bits of a result must not depend on the other
tokens."""
KV = tuple[Tensor, Tensor]
"""The key cache and the value cache of one layer, each [B, KV, S, D]."""
Add = Callable[[Tensor], Tensor]
"""A function of this rank's partial sum. It adds the partial sums of all ranks in rank order, and
returns the total on each rank."""


@dataclass
class Inputs:
    """The inputs of a pass that all layers share.

    Attributes:
        cos: Rotary table [S, D/2]. If sliding layers have a separate table, its columns follow
            ([S, D] in all).
        sin: Rotary table of the same shape.
        position_ids: Position of each token in the text, [B, n].
        write_indices: Slot of each sequence's first new token, [B]. The other tokens use the next
            slots.
        attn_mask: Additive mask [B, 1, n, S]. A value is 0 if the token sees the slot, and -30000
            if it does not. Kernels that derive the mask use only its shape.
        logit_rows: Indices [R] (from 0 to n - 1) of the tokens for which the verify graph computes
            logits. They are the same in every sequence. None stands for all tokens.
        tree: Describes the tree for kernels that derive the mask, if the tokens may form a tree. It
            consists of the number of first slots that every token sees [B], and of a table
            [B, n, width] of the following slots, which is 1 where a token sees the slot. It is None
            if each token sees all slots up to the token's slot.
        whole: Whether the pass runs whole sequences from their first tokens on. Each token then
            sees the tokens up to itself, and the pass uses neither caches nor a mask. GPUs have
            fast kernels for this attention.
        near: The same inputs for sliding layers. The first call of :meth:`within` sets them.
        query_mask: The mask with a row for each query of a KV head. The first call of
            :meth:`folded` sets it.
        ancestors: The slots [B, n] of each token's ancestors, beginning with its parent. Ancestors
            are added when a layer needs them.
    """

    cos: Tensor
    sin: Tensor
    position_ids: Tensor
    write_indices: Tensor
    attn_mask: Tensor
    logit_rows: Tensor | None = None
    tree: tuple[Tensor, Tensor] | None = None
    whole: bool = False
    near: "Inputs | None" = field(default=None, repr=False)
    query_mask: Tensor | None = field(default=None, repr=False)
    ancestors: list[Tensor] = field(default_factory=list, repr=False)

    def anew(self) -> "Inputs":
        """Return these inputs without the values that layers have derived from them."""
        return replace(self, near=None, query_mask=None, ancestors=[])

    def within(self, window: int) -> "Inputs":
        """Return these inputs for layers whose tokens see ``window`` tokens, including themselves.
        The first call makes them and keeps them in ``near``.

        A round's uncommitted slots are within the window of each of its nodes, because the window
        is longer than a round. So a slot's number can serve as its position, even in a tree.
        """
        if self.near is None:
            hidden = numbers(self.attn_mask, 3) <= self.position_ids[:, None, :, None] - window
            mask = torch.minimum(self.attn_mask, hidden.to(self.attn_mask.dtype) * MASKED)
            self.near = replace(self, attn_mask=mask, query_mask=None)
        return self.near

    def folded(self, group: int) -> Tensor:
        """Return the mask [B, 1, group n, S] for layers that fold query heads. Such layers treat
        the ``group`` query heads of a KV head as more queries [B, KV, group n, D], so attention
        reads each cache only once. The first call makes the mask.
        """
        if self.query_mask is None:
            self.query_mask = self.attn_mask.repeat(1, 1, group, 1)
        return self.query_mask

    @property
    def own_slots(self) -> Tensor:
        """The slot of each token [B, n]."""
        return self.write_indices[:, None] + numbers(self.position_ids, 1)


def numbers(x: Tensor, axis: int) -> Tensor:
    """Return the numbers 0, 1, ... (int64), one for each index of an axis of a tensor."""
    return torch.arange(x.shape[axis], device=x.device)


def capped(x: Tensor, cap: float) -> Tensor:
    """Limit values smoothly to between -cap and cap. A cap of 0 means no cap."""
    return x if not cap else cap * torch.tanh(x / cap)


def rotate(x: Tensor, inputs: Inputs, local: bool = False) -> Tensor:
    """Apply the rotary embedding to x [B, H, n, D]. ``local`` chooses the embedding of sliding
    layers. Each value of the first half of D rotates with a value of the second half."""
    half = x.shape[-1] // 2
    columns = slice(-half, None) if local else slice(0, half)
    tables = (table[:, columns] for table in (inputs.cos, inputs.sin))
    cos, sin = (table[inputs.position_ids][:, None] for table in tables)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def write_cache(cache: Tensor, new: Tensor, write_indices: Tensor) -> Tensor:
    """Write keys or values of new tokens [B, KV, n, D] into a cache [B, KV, S, D], from the slots
    ``write_indices`` [B] on.

    Without autograd the cache is written in place, as in engines, because a copy would move all S
    slots for n tokens. With autograd a copy is returned, because the backward pass may need the old
    content.
    """
    slots = write_indices[:, None] + numbers(new, 2)
    if torch.is_grad_enabled():
        cache = cache.clone()
    # scatter_ is not used, because it copies a cache that is a view.
    cache[numbers(new, 0)[:, None], :, slots] = new.transpose(1, 2)
    return cache


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    inputs: Inputs,
    geometry: Geometry,
    sinks: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention of q [B, H, n, D] over all S slots of the caches [B, KV, S, D].
    Returns [B, H, n, size of values]. If the mask has fewer columns than the caches have slots,
    only the first slots are read.

    Heads are always folded, because torch's own grouped attention repeats the caches for every
    head. Torch adds in another order for a single query than for several, so its engine pads calls
    to an even number of queries.
    """
    kv_heads = keys.shape[1]
    folded = q.reshape(q.shape[0], kv_heads, -1, q.shape[3])
    mask = inputs.folded(q.shape[1] // kv_heads)
    if sinks is not None:  # repeat them for the folded queries
        sinks = sinks[:, None].expand(-1, q.shape[2]).reshape(kv_heads, -1, 1)
    y = _attention(folded, keys, values, mask, geometry, sinks)
    return y.reshape(*q.shape[:3], -1)


def _attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    geometry: Geometry,
    sinks: Tensor | None = None,
) -> Tensor:
    """One attention operator. The number of heads in q is a multiple of the number of heads in the
    caches. ``sinks`` [heads, n or 1, 1] are extra scores whose value vectors are 0."""
    scale = geometry.score_scale
    cap = geometry.attention_cap
    slots = mask.shape[3]
    keys = keys[:, :, :slots]
    values = values[:, :, :slots]
    if cap or sinks is not None:  # torch's attention has neither caps nor sinks
        scores = (capped(q @ keys.transpose(2, 3) * scale, cap) + mask).float()
        if sinks is not None:
            beside = sinks.float().expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, beside), -1)
        weights = scores.softmax(-1)[..., :slots]
        return weights.to(q.dtype) @ values
    return scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)


def attend_whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    geometry: Geometry,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention of whole sequences. Each token attends to the tokens up to itself, or
    to the last ``window`` of them."""
    if not (geometry.attention_cap or window or geometry.sinks):
        scale = geometry.attention_scale or None
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=scale)
    before = numbers(q, 2)[:, None] - numbers(q, 2)
    hidden = (before < 0) | (before >= window) if window else before < 0
    mask = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, MASKED)[None, None]
    keys, values = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    sinks = None if sinks is None else sinks[:, None, None]
    return _attention(q, keys, values, mask, geometry, sinks)


@dataclass
class TorchOperations:
    """Computes one pass. A value is a tensor [B, n, columns].

    Attributes:
        model: The model.
        module: Returns a module by its name in the description.
        inputs: The inputs of the pass, or None if no operation needs other tokens.
        caches: The caches by their indices. Operations replace them by the written caches.
        add_ranks: A function that adds the partial sums of all ranks, or None if one process has
            all weights.
        wide: Whether logits without a cap become float32.
    """

    model: Model
    module: Callable[[str], Any]
    inputs: Inputs | None = None
    caches: dict[int, KV] = field(default_factory=dict)
    add_ranks: Add | None = None
    wide: bool = True

    def embed(self, ids: Tensor, table: Table) -> Tensor:
        x: Tensor = self.module(table.name)(ids)
        return x if table.scale == 1 else (x.float() * table.scale).to(x.dtype)

    def weight(self, module: str, size: int) -> Tensor:
        found: Tensor = self.module(module).weight
        return found

    def multiply(self, x: Tensor, y: Tensor, name: str) -> Tensor:
        return x * y

    def times(self, x: Tensor, module: str, size: int, name: str) -> Tensor:
        wide: Tensor = x.float() * self.module(module).weight.float()
        return wide.to(x.dtype)

    def limit(self, x: Tensor, most: float, name: str) -> Tensor:
        return x.clamp(-most, most)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        if norm.bare:
            wide = x.float().reshape(*x.shape[:-1], -1, norm.bare)
            return rms_norm(wide, [norm.bare], eps=norm.eps).flatten(-2).to(x.dtype)
        normed: Tensor = self.module(norm.name)(x, norm)
        return normed

    def scale(self, x: Tensor, gate: Tensor, name: str) -> Tensor:
        return x * gate.sigmoid()

    def activate(self, x: Tensor, block: Block, name: str) -> Tensor:
        kind = block.geometry.activation
        if kind == "relu2":
            return relu(x).square()
        if kind == "gelu_tanh":
            return gelu(x, approximate="tanh")
        above, below = self.module(f"{block.prefix}{XIELU}").weight.float()
        wide = x.float()
        curved = (torch.expm1(wide.clamp_max(XIELU_LIMIT)) - wide) * below
        curved = torch.where(wide > 0, above * wide.square(), curved)
        return (curved + XIELU_SLOPE * wide).to(x.dtype)

    def product(
        self,
        x: Tensor,
        layers: Sequence[Linear],
        name: str,
        norm: Norm | None = None,
        residual: Sequence[Tensor] = (),
        activation: str = "",
    ) -> Tensor:
        y = self.linear(self.norm(x, norm) if norm else x, layers)
        if activation:
            return self.gated(y, activation)
        if self.add_ranks and split_side(f"{layers[0].name}.weight") == INPUTS:
            y = self.add_ranks(y)
        return self.add(residual, y, name) if residual else y

    def linear(self, x: Tensor, layers: Sequence[Linear]) -> Tensor:
        """Return this rank's part of the outputs of linear layers, joined along the last
        dimension."""
        outputs = [self.module(layer.name)(x) for layer in layers]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def gated(self, y: Tensor, activation: str) -> Tensor:
        """Return the activated gate times up. The first half of y is the gate, the second half is
        up."""
        gate, up = y.chunk(2, -1)
        if activation == "clamped":
            gate = gate.clamp_max(CLAMP)
            return gate * (gate * CLAMPED_SLOPE).sigmoid() * (up.clamp(-CLAMP, CLAMP) + 1)
        return (silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")) * up

    def mixture(
        self,
        x: Tensor,
        block: Block,
        mixture: Mixture,
        name: str,
        norm: Norm | None,
        residual: Sequence[Tensor],
    ) -> Tensor:
        own = mixture.router_norm
        routed = x if own is None else self.norm(x, own)
        x = self.norm(x, norm) if norm else x
        shares = self.shares(x if own is None else routed, block, mixture)
        # On a GPU, the host must not wait for the choice of experts.
        compute = self.on_all if x.is_cuda else self.on_chosen
        y = compute(x, shares, block, mixture)
        y = self.add_ranks(y) if self.add_ranks else y
        return self.add(residual, y, name) if residual else y

    def shares(self, x: Tensor, block: Block, mixture: Mixture) -> Tensor:
        """Return the weights of the experts [B, n, E] in the type of x. A weight is 0 if the token
        does not use the expert."""
        experts = block.geometry.experts
        assert experts is not None
        if experts.choice_bias:  # differences of the sums are too small for 16 bits
            router = self.weight(mixture.router.name, experts.count).float()
            logits = x.float() @ router.T
        else:
            logits = self.linear(x, [mixture.router]).float()
        scores = logits.sigmoid() if experts.scores == "sigmoid" else logits.softmax(-1)
        indices = self._ranks(scores, experts, mixture).topk(experts.used, -1).indices
        if experts.scores == "sparsemixer":
            chosen = _near_shares(logits, indices, experts.margin)
        else:
            chosen = scores.gather(-1, indices)
        if experts.normed:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + experts.norm_eps)
        if mixture.scales:
            chosen = chosen * self.weight(mixture.scales, experts.count).float()[indices]
        chosen = chosen * experts.scale
        return torch.zeros_like(scores).scatter(-1, indices, chosen).to(x.dtype)

    def _ranks(self, scores: Tensor, experts: Experts, mixture: Mixture) -> Tensor:
        """Return the scores by which experts are chosen. They include the biases, and are minus
        infinity outside of the groups that a token uses."""
        if mixture.bias:
            scores = scores + self.weight(mixture.bias, experts.count)
        if experts.groups == 1:
            return scores
        apart = scores.view(*scores.shape[:-1], experts.groups, -1)
        best = apart.topk(experts.group_best, -1).values.sum(-1)
        used = best.topk(experts.used_groups, -1).indices
        left_out = torch.ones_like(best).scatter(-1, used, 0)[..., None] != 0
        return apart.masked_fill(left_out, -torch.inf).flatten(-2)

    def on_all(self, x: Tensor, shares: Tensor, block: Block, mixture: Mixture) -> Tensor:
        """Return the weighted sum of the experts. Each expert runs on all tokens.

        For tokens that do not use an expert, its inputs are 0, so its outputs are 0 and never
        exceed the range of the type.
        """
        y = torch.zeros_like(x)
        for expert, share in zip(mixture.experts, torch.split(shares, 1, -1), strict=True):
            y = y + self._expert(x * (share != 0).to(x.dtype), block, expert) * share
        return y

    def on_chosen(self, x: Tensor, shares: Tensor, block: Block, mixture: Mixture) -> Tensor:
        """Return the same sum, but run each expert only on the tokens that use it."""
        given = x.flatten(0, -2)
        shares = shares.flatten(0, -2)
        y = torch.zeros_like(given)
        for index in (shares != 0).any(0).nonzero()[:, 0].tolist():
            tokens = shares[:, index].nonzero()[:, 0]
            rows = torch.cat((tokens, tokens[:1].expand(-len(tokens) % EVEN_ROWS)))
            found = self._expert(given[rows], block, mixture.experts[index])[: len(tokens)]
            y = y.index_add(0, tokens, found * shares[tokens, index, None])
        return y.view(x.shape)

    def _expert(self, x: Tensor, block: Block, expert: tuple[Linear, Linear, Linear]) -> Tensor:
        *layers, down = expert
        gated = self.gated(self.linear(x, layers), block.geometry.activation)
        return self.linear(gated, [down])

    def add(self, residual: Sequence[Tensor], y: Tensor, name: str) -> Tensor:
        """Return the sum of the first residual, y and the other residuals. They are added in this
        order."""
        return reduce(torch.add, residual[1:], residual[0] + y)

    def split(self, x: Tensor, sizes: Sequence[int], names: Sequence[str]) -> Sequence[Tensor]:
        return torch.split(x, list(sizes), -1)

    def concat(self, parts: Sequence[Tensor], name: str) -> Tensor:
        return torch.cat(list(parts), -1)

    def by_heads(self, x: Tensor, layers: Sequence[Linear], name: str) -> Tensor:
        parts = x.chunk(len(layers), -1)
        found = [self.linear(part, [one]) for part, one in zip(parts, layers, strict=True)]
        return torch.cat(found, -1)

    def _latent_attention(self, qkv: Tensor, block: Block, latent: Latent, attends: bool) -> Tensor:
        """Compute attention to the rows in the caches."""
        geometry = block.geometry
        inputs = self._inputs()
        counts = [geometry.num_heads] * attends + [1]
        sizes = [count * size for count in counts for size in (latent.rank, latent.rotary)]
        parts = torch.split(qkv, sizes, -1)
        rows = []
        for still, turned, count in zip(parts[::2], parts[1::2], counts, strict=True):
            heads = turned.view(*turned.shape[:2], count, -1).transpose(1, 2)
            own = still.view(*still.shape[:2], count, -1).transpose(1, 2)
            rows.append(torch.cat((own, rotate(heads, inputs)), -1))
        if not inputs.whole:
            self._write_states(rows[-1][:, 0], range(block.cache, block.cache + 1))
        if not attends:
            return qkv
        if inputs.whole:
            y = attend_whole(rows[0], rows[1], rows[1][..., : latent.rank], geometry)
        else:
            slots = inputs.attn_mask.shape[3]
            halves = [part[:, :, :slots] for part in self.caches[block.cache]]
            keys = torch.cat(halves, -1)[..., : latent.width]
            y = attend(rows[0], keys, keys[..., : latent.rank], inputs, geometry)
        return y.transpose(1, 2).flatten(2)

    def attention(self, qkv: Tensor, block: Block, name: str, attends: bool) -> Tensor:
        geometry = block.geometry
        if geometry.latent:
            return self._latent_attention(qkv, block, geometry.latent, attends)
        inputs = self._inputs(block)
        window = geometry.window if block.kind == SLIDING else 0
        heads = qkv.view(*qkv.shape[:2], -1, geometry.head_dim).transpose(1, 2)
        counts = [geometry.num_heads] * attends + [geometry.num_kv_heads] * 2 * block.writes
        parts = list(torch.split(heads, counts, 1))
        written: KV | None = None
        if block.writes:
            written = self._turned(parts[-2], block, "k_norm", inputs), parts[-1]
            self._write_heads(block, *written)
        if not attends:
            return qkv
        q = self._turned(parts[0], block, "q_norm", inputs)
        sinks = self.module(f"{block.prefix}{SINKS}").weight if geometry.sinks else None
        if inputs.whole:
            y = attend_whole(q, *(written or self.caches[block.cache]), geometry, window, sinks)
        else:
            keys, values = (self._as_heads(part, block) for part in self.caches[block.cache])
            seen = inputs.within(window) if window else inputs
            y = attend(q, keys, values, seen, geometry, sinks)
        return y.transpose(1, 2).flatten(2)

    def _write_heads(self, block: Block, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [B, heads, n, D] of a block into its cache. A pass over whole
        sequences keeps them instead, if other layers read them."""
        whole = self.model.geometry
        own = block.geometry
        if self._inputs().whole:
            if whole.shared_from:
                self.caches[block.cache] = keys, values
            return
        if own.head_dim != whole.head_dim or own.num_kv_heads != whole.num_kv_heads:
            keys, values = (self._as_cached(part, block) for part in (keys, values))
        self._write(block.cache, keys, values)

    def _as_cached(self, x: Tensor, block: Block) -> Tensor:
        """Return keys or values [B, heads, n, D] of a block in the shape of the caches."""
        whole = self.model.geometry
        batch, heads, count, size = x.shape
        apart = x.reshape(batch, heads, count, size // whole.head_dim, whole.head_dim)
        spare = whole.num_kv_heads - self._units(block)
        return pad(apart.transpose(2, 3).flatten(1, 2), (0, 0, 0, 0, 0, spare))

    def _units(self, block: Block) -> int:
        """Return the number of a cache's heads that a block uses."""
        own = block.geometry
        return own.num_kv_heads * own.head_dim // self.model.geometry.head_dim

    def _as_heads(self, cache: Tensor, block: Block) -> Tensor:
        """Return keys or values of a cache in the block's shape [B, heads, S, D]. The result is a
        copy if one of the block's heads takes the place of several cache heads."""
        own = block.geometry
        used = cache[:, : self._units(block)]
        if own.head_dim == cache.shape[3]:
            return used
        batch, _, slots, size = used.shape
        apart = used.reshape(batch, own.num_kv_heads, -1, slots, size)
        return apart.transpose(2, 3).flatten(3)

    def _turned(self, x: Tensor, block: Block, norm: str, inputs: Inputs) -> Tensor:
        """Return the queries or keys x [B, heads, n, D], normalized and rotated."""
        geometry = block.geometry
        own = block.norm(f"self_attn.{norm}")
        if geometry.qk_norm and not geometry.qk_norm_rotated:
            x = self.norm(x, own)
        if block.kind != UNROTATED:
            x = rotate(x, inputs, block.kind == SLIDING and geometry.local_theta > 0)
        return self.norm(x, own) if geometry.qk_norm_rotated else x

    def _inputs(self, block: Block | None = None) -> Inputs:
        """Return the inputs of a block. A block of EAGLE-3 has separate rotary tables, and a mask
        that hides the first slot from all tokens except the first."""
        inputs = self.inputs
        assert inputs is not None
        if block is None or block.eagle is None:
            return inputs
        mask = inputs.attn_mask
        slots = numbers(inputs.attn_mask, 3)
        hidden = (slots == 0) & (inputs.own_slots > 0)[:, None, :, None]
        head = self.module(EXIT_HEAD.removesuffix("."))
        cos = head.cos.to(mask.dtype)
        sin = head.sin.to(mask.dtype)
        mask = torch.where(hidden, MASKED, mask)
        return replace(inputs, cos=cos, sin=sin, attn_mask=mask, query_mask=None)

    def _write(self, index: int, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [B, KV, n, D] of the tokens into a cache."""
        at = self._inputs().write_indices
        old_keys, old_values = self.caches[index]
        self.caches[index] = write_cache(old_keys, keys, at), write_cache(old_values, values, at)

    def write_state(self, x: Tensor, name: str) -> Tensor:
        self._write_states(x, self.model.state_caches)
        return x

    def _write_states(self, x: Tensor, indices: range) -> None:
        """Write states into caches. They fill the keys of the first cache, then its values, then
        the next cache."""
        geometry = self.model.geometry
        whole = pad(x, (0, len(indices) * self.model.state_width - x.shape[2]))
        heads = whole.view(*x.shape[:2], -1, geometry.head_dim).transpose(1, 2)
        parts = torch.split(heads, geometry.num_kv_heads, 1)
        for index, keys, values in zip(indices, parts[::2], parts[1::2], strict=True):
            self._write(index, keys, values)

    def convolution(self, x: Tensor, block: Block, name: str) -> Tensor:
        """The sum is computed in float32 and begins with the earliest token."""
        gate, gate_behind, given = x.chunk(3, -1)
        state = gate * given
        taps = block.geometry.taps
        if not self._inputs().whole:
            self._write_states(state, block.state_caches)
        return gate_behind * self._convolved(state, block, TAPS, taps).to(x.dtype)

    def _convolved(self, state: Tensor, block: Block, name: str, taps: int) -> Tensor:
        """Return the sums [B, n, columns] (float32) of a convolution over states. The caches must
        already hold the states, unless the pass has whole sequences."""
        columns = state.shape[2]
        weights = self.module(f"{block.prefix}{name}").weight[:, 0].float()
        total = torch.zeros_like(state, dtype=torch.float32)
        for tap in range(taps):
            distance = taps - 1 - tap
            if distance == 0:
                found = state
            elif self._inputs().whole:
                found = pad(state, (0, 0, distance, 0))[:, : state.shape[1]]
            else:
                slots = self._ancestors(distance)
                found = self._read_states(slots, block.state_caches, columns)
            total = total + found.float() * weights[:, tap]
        return total

    def delta_rule(self, x: Tensor, block: Block, name: str) -> Tensor:
        """States and outputs are computed in float32.

        Torch's float32 exponentials depend on an element's place in memory. Its float64
        exponentials rarely do after rounding.
        """
        rule = block.geometry.delta
        assert rule is not None
        mixed, gates, *steps, decays = torch.split(x, list(rule.inputs.values()), -1)
        whole = self._inputs().whole
        if not whole:
            self._write_states(mixed, block.state_caches)
        convolved = self._convolved(mixed, block, DELTA_TAPS, rule.taps)
        if rule.conv_bias:
            convolved = convolved + self._wide_weight(block, DELTA_TAPS_BIAS)
        parts = torch.split(silu(convolved), [rule.keys, rule.keys, rule.values], -1)
        sizes = (rule.key_dim, rule.key_dim, rule.value_dim)
        q, k, v = (_heads(one, size) for one, size in zip(parts, sizes, strict=True))
        bias = self._wide_weight(block, DELTA_BIAS)
        rate = self._wide_weight(block, DELTA_DECAY).exp()
        sizes_of_steps = softplus(decays.double() + bias).float()
        if rule.space:
            given = _Deltas(q, k, v * sizes_of_steps[..., None], None, -rate * sizes_of_steps)
        else:
            q, k = (
                one * torch.rsqrt(one.square().sum(-1, keepdim=True) + DELTA_EPS) for one in (q, k)
            )
            rates = steps[0].double().sigmoid().float()
            given = _Deltas(q * rule.key_dim**-0.5, k, v, rates, -rate * sizes_of_steps)
        y = self._ruled_whole(given) if whole else self._ruled(given, mixed, block)
        if rule.space:
            y = y + self._wide_weight(block, DELTA_SKIP)[:, None] * v
        else:
            y = self.norm(y.to(x.dtype), block.norm(DELTA_NORM)).float()
        return (y.flatten(2) * silu(gates.float())).to(x.dtype)

    def _wide_weight(self, block: Block, name: str) -> Tensor:
        """A weight of a block in float32."""
        weight: Tensor = self.module(f"{block.prefix}{name}").weight
        return weight.float()

    def _ruled_whole(self, given: "_Deltas") -> Tensor:
        """Return the outputs for whole sequences."""
        sums = given.logs.transpose(1, 2).cumsum(-1)
        earlier = numbers(sums, 2)[:, None] >= numbers(sums, 2)
        decays = torch.where(earlier, sums[..., None] - sums[:, :, None], -torch.inf).exp()
        keys = given.k.permute(0, 2, 3, 1)
        deltas = given.v.transpose(1, 2)
        if given.steps is not None:
            steps = given.steps.transpose(1, 2)[..., None]
            system = given.scores(given.k, keys, decays) * steps
            deltas = torch.linalg.solve_triangular(
                system, deltas * steps, upper=False, unitriangular=True
            )
        y: Tensor = given.scores(given.q, keys, decays) @ deltas
        return y.transpose(1, 2)

    def _ruled(self, given: "_Deltas", mixed: Tensor, block: Block) -> Tensor:
        """Return the outputs of tokens that see other tokens in the caches, and write the states of
        these tokens."""
        rule = block.geometry.delta
        inputs = self._inputs()
        assert rule is not None
        own = [mixed, given.k.flatten(2), torch.zeros_like(given.v.flatten(2)), given.logs]
        self._write_states(torch.cat(own, -1).to(mixed.dtype), block.state_caches)
        slots = numbers(inputs.attn_mask, 3).expand(mixed.shape[0], -1)
        states = self._read_states(slots, block.state_caches, block.geometry.state_size).float()
        _, keys, deltas, logs = torch.split(states, list(rule.parts), -1)
        keys = _heads(keys, rule.key_dim).permute(0, 2, 3, 1).contiguous()
        deltas = _heads(deltas, rule.value_dim).transpose(1, 2).contiguous()
        # At a token, a slot's outer product has been multiplied by the decays of all later slots
        # that the token sees.
        seen = (inputs.attn_mask > MASKED / 2).expand(-1, rule.value_heads, -1, -1)
        logs = torch.where(seen, logs.transpose(1, 2)[:, :, None], 0)
        later = pad(logs[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)
        decays = torch.where(seen, later, -torch.inf).double().exp().float()
        rows = numbers(mixed, 0)[:, None, None]
        heads = numbers(decays, 1)[:, None]
        v = given.v.transpose(1, 2)
        found = []
        for token in range(mixed.shape[1]):  # always products of a single token
            at = slice(token, token + 1)
            both = torch.cat((given.k[:, at], given.q[:, at]), 1)
            known, seen_by = torch.split(given.scores(both, keys, decays[:, :, at]), 1, 2)
            new = v[:, :, at]
            if given.steps is not None:
                step = given.steps[:, at].transpose(1, 2)[..., None]
                new = (new - known @ deltas) * step
            deltas[rows, heads, inputs.own_slots[:, None, at]] = new
            own[2][:, at] = new.transpose(1, 2).flatten(2)
            found.append(seen_by @ deltas)
        self._write_states(torch.cat(own, -1).to(mixed.dtype), block.state_caches)
        return torch.cat(found, 2).transpose(1, 2)

    def carry_state(self, name: str) -> Tensor:
        """Returns [B, 1, 2 KV D]. The state is zero if there is no token before."""
        inputs = self._inputs()
        [index] = self.model.state_caches
        count = inputs.position_ids.shape[1]
        there = (inputs.write_indices > 0)[:, None]
        before = inputs.write_indices[:, None] - there.long()
        keys, values = (_read(part, before) * there[..., None, None] for part in self.caches[index])
        self._write(index, *(part.expand(-1, -1, count, -1) for part in (keys, values)))
        return torch.cat((keys, values), 1).transpose(1, 2).flatten(2)

    def parent_state(self, name: str, written: Tensor | None = None) -> Tensor:
        """Read the states from the caches, which include the ``written`` states."""
        size = self.model.geometry.hidden_size
        return self._read_states(self._ancestors(1), self.model.state_caches, size)

    def _read_states(self, slots: Tensor, indices: range, size: int) -> Tensor:
        """Return the first ``size`` numbers of the states in slots [B, n] of caches. The result is
        zero for slot -1."""
        indices = indices[: self.model.geometry.caches_for(size)]
        caches = [part for index in indices for part in self.caches[index]]
        found = torch.cat([_read(part, slots.clamp_min(0)) for part in caches], 1)
        states = found.transpose(1, 2).flatten(2)[..., :size]
        return torch.where((slots >= 0)[..., None], states, 0)

    def _ancestors(self, distance: int) -> Tensor:
        """Return the slots [B, n] of each token's ancestor at this distance, or -1 if there is
        none."""
        inputs = self._inputs()
        slots = numbers(self._inputs().attn_mask, 3)
        found = inputs.ancestors
        while len(found) < distance:
            later = found[-1] if found else inputs.own_slots
            before = (inputs.attn_mask[:, 0] > MASKED / 2) & (slots < later[:, :, None])
            found.append(torch.where(before, slots, -1).amax(-1))
        return found[distance - 1]

    def last(self, x: Tensor) -> Tensor:
        rows = self._inputs().logit_rows
        return x if rows is None else x.index_select(1, rows)

    def logits(self, x: Tensor, head: Linear, norm: Norm | None, cap: float) -> Tensor:
        logits = self.product(x, [head], "logits", norm)
        if head.bias:
            logits = logits + self.weight(LOGIT_BIAS, head.outputs)
        return capped(logits.float() if cap or self.wide else logits, cap)


def _near_shares(logits: Tensor, indices: Tensor, margin: float) -> Tensor:
    """Return the shares [..., k] that sparsemixer gives the chosen experts."""
    left = logits
    shares = list[Tensor]()
    for index in torch.split(indices, 1, -1):
        most = logits.gather(-1, index)
        far = (most - logits) / logits.abs().maximum(most) > margin
        shares.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, index))
        left = left.scatter(-1, index, -torch.inf)
    return torch.cat(shares, -1)


@dataclass
class _Deltas:
    """Tokens of the delta rule or of a state space, in float32.

    Attributes:
        q, k: Queries and keys, [B, n, key heads, key_dim]. The delta rule normalizes them.
        v: Values [B, n, value heads, value_dim]. In a state space, these are the deltas.
        steps: Step sizes [B, n, value heads], or None in a state space.
        logs: Logarithms of decays, of the same shape.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    steps: Tensor | None
    logs: Tensor

    def scores(self, rows: Tensor, keys: Tensor, decays: Tensor) -> Tensor:
        """Return the products of queries or keys with ``keys`` [B, key heads, key_dim, S],
        multiplied by the decays [B, value heads, n, S]."""
        group = decays.shape[1] // keys.shape[1]
        products = rows.transpose(1, 2) @ keys
        return products.repeat_interleave(group, 1) * decays


def _heads(x: Tensor, size: int) -> Tensor:
    """Split x [B, n, heads size] into heads [B, n, heads, size]."""
    return x.view(*x.shape[:2], -1, size)


def _read(cache: Tensor, slots: Tensor) -> Tensor:
    """Return the values [B, KV, n, D] that a cache [B, KV, S, D] holds in the given slots
    [B, n]."""
    at = slots[:, None, :, None].expand(-1, cache.shape[1], -1, cache.shape[3])
    return torch.gather(cache, 2, at)
