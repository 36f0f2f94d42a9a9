"""The decoder over static KV caches: one definition for training, checking, export and the torch
engine.

A block is the Llama block: RMSNorm, rotary attention with grouped heads, SwiGLU
(``feed_forward.py``); or has other parts in their places, as the geometry says. Each layer has a
cache [B, KV, S, D] for keys and one for values. A pass writes the keys and values of its ``n`` new
tokens at ``write_indices``, and attention sees all S slots through an additive mask [B, 1, n, S].
Positions and visibility are inputs, so the same pass serves a prompt, a single token, a chain or a
token tree.

Parameters have the names of Llama's in a Hugging Face checkpoint. The four operations that engines
fuse (norm, rotary embedding, cache write, attention) are exported as single ONNX opset 24
operators, so ``torch.onnx.export`` writes the graph that engines run.

A token's results must not depend on how many tokens a pass has: then drafting changes no bit of any
logit. Matrix products and norms of ONNX Runtime keep this by themselves, attention only with two
queries or more: see :func:`fold_mask`.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from eesd.common.geometry import FULL, SLIDING, UNROTATED, Geometry
from eesd.common.manifest import MASKED
from eesd.model.feed_forward import joint_linear, make_feed_forward


@dataclass
class Inputs:
    """The inputs of a pass that all layers share.

    Attributes:
        cos: Rotary table [S, D/2], and where sliding layers have one of their own, that beside it:
            [S, D].
        sin: Rotary table of the same shape.
        position_ids: Position of each token in the text, [B, n].
        write_indices: Slot of each sequence's first new token, [B]. The other tokens follow it.
        attn_mask: Additive mask [B, 1, n, S]: 0 where a token sees a slot, -30000 where it does
            not. Kernels that derive it use only its shape.
        query_mask: The same with a row for each query that a KV head gets, from
            :func:`fold_mask`. None: heads stay apart.
        logit_rows: Which of the n tokens get logits from verify, [R]; the same ones in every
            sequence. None: all of them.
        tree: For these kernels, if the tokens may be a tree: each sees the slots below a number
            [B], and of those from there on where it has a 1 in [B, n, width]. None: each sees the
            slots up to its own.
        whole: Whether the pass has its sequences from their first tokens on, and each token sees
            those up to itself. It uses neither caches nor a mask then, and GPUs have fast kernels
            for such an attention.
        near: The same inputs for sliding layers, once one has asked for them.
        folded: The arguments that :func:`fold_mask` had.
    """

    cos: Tensor
    sin: Tensor
    position_ids: Tensor
    write_indices: Tensor
    attn_mask: Tensor
    query_mask: Tensor | None = None
    logit_rows: Tensor | None = None
    tree: tuple[Tensor, Tensor] | None = None
    whole: bool = False
    near: "Inputs | None" = field(default=None, repr=False)
    folded: tuple[int, int] = (1, 1)

    def within(self, window: int) -> "Inputs":
        """These inputs for layers whose tokens see ``window`` tokens, their own included: made
        once, and kept in ``near``.

        The slots of tokens that a round has not committed are behind the window of none of its
        nodes, as long as the window is longer than a round: so a slot's number stands for its
        position, wherever a node of a tree lies.
        """
        if self.near is None:
            hidden = numbers(self.attn_mask, 3) <= self.position_ids[:, None, :, None] - window
            mask = torch.minimum(self.attn_mask, hidden.to(self.attn_mask.dtype) * MASKED)
            self.near = replace(self, attn_mask=mask, query_mask=None)
            if self.query_mask is not None:
                self.near = fold_mask(self.near, *self.folded)
        return self.near


KV = tuple[Tensor, Tensor]
"""The key cache and the value cache of one layer, each [B, KV, S, D]."""


def numbers(x: Tensor, axis: int) -> Tensor:
    """0, 1, ... for the places of a tensor along an axis, int64."""
    return torch.arange(x.shape[axis], device=x.device)


class RMSNorm(nn.Module):
    """Root mean square normalization; statistics in float32.

    Args:
        size: Number of values.
        eps: What is added to the mean square.
        wide: Whether the weight is float32, whatever the type of x, and only the product is rounded
            to that type.
    """

    def __init__(self, size: int, eps: float, wide: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float32 if wide else None))
        self.eps, self.wide = eps, wide

    def forward(self, x: Tensor) -> Tensor:
        if self.wide:
            return self._normed(x.float()).to(x.dtype)
        return self._normed(x)

    def _normed(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class JointNorm(RMSNorm):
    """The norm of queries or keys x [B, H, n, D] over all heads together."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.transpose(1, 2)
        return super().forward(heads.flatten(2)).view(heads.shape).transpose(1, 2)


class Embeddings(nn.Embedding):
    """The embedding table, whose rows are read times a factor."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry.vocab_size, geometry.hidden_size)
        self.scale = geometry.embedding_scale

    def forward(self, ids: Tensor) -> Tensor:
        x = super().forward(ids)
        return x if self.scale == 1 else (x.float() * self.scale).to(x.dtype)


def capped(x: Tensor, cap: float) -> Tensor:
    """Values between -cap and cap: those near 0 stay, nearly. 0 is no cap."""
    return x if not cap else cap * torch.tanh(x / cap)


def rotate(x: Tensor, inputs: Inputs, local: bool = False) -> Tensor:
    """Apply the rotary embedding to x [B, H, n, D], that of sliding layers if ``local``. The two
    halves of D are rotated."""
    half = x.shape[-1] // 2
    columns = slice(half, 2 * half) if local else slice(0, half)
    tables = inputs.cos, inputs.sin
    if tables[0].shape[1] > half:
        tables = tables[0][:, columns], tables[1][:, columns]
    cos, sin = (table[inputs.position_ids][:, None] for table in tables)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def write_cache(cache: Tensor, new: Tensor, write_indices: Tensor) -> Tensor:
    """Write keys or values of new tokens [B, KV, n, D] into a cache [B, KV, S, D], from the slots
    ``write_indices`` [B] on.

    Without autograd the cache is written in place, as engines do it: a copy would move all S slots
    for n tokens. With autograd a copy is returned, because the backward pass may need the old
    content.
    """
    rows = torch.arange(len(new), device=new.device)[:, None]
    slots = write_indices[:, None] + torch.arange(new.shape[2], device=new.device)
    if torch.is_grad_enabled():
        cache = cache.clone()
    cache[rows, :, slots] = new.transpose(1, 2)  # not scatter_, which copies a cache that is a view
    return cache


def fold_mask(inputs: Inputs, group: int, kv_heads: int) -> Inputs:
    """Inputs whose layers fold the ``group`` query heads of a KV head into its queries:
    [B, KV, group n, D].

    One attention then reads each cache once. Torch computes a single query in another order than
    several, so its engine pads calls to an even number.
    """
    mask = torch.cat([inputs.attn_mask] * group, 2)
    return replace(inputs, query_mask=mask, near=None, folded=(group, kv_heads))


@dataclass(frozen=True)
class Scores:
    """How attention makes scores of products of queries and keys.

    Attributes:
        scale: What they are multiplied by; None: D ** -0.5.
        cap: See :func:`capped`.
    """

    scale: float | None = None
    cap: float = 0.0


PLAIN = Scores()


def attend(
    q: Tensor, keys: Tensor, values: Tensor, inputs: Inputs, scores: Scores = PLAIN
) -> Tensor:
    """Grouped-query attention of q [B, H, n, D] over all S slots of the caches [B, KV, S, D];
    [B, H, n, D]. Torch reads only as many of the first slots as the mask has columns.

    Torch always gets folded heads, because its own grouped attention repeats the caches for every
    head.
    """
    mask, kv_heads = inputs.query_mask, keys.shape[1]
    if mask is None:
        mask = inputs.attn_mask.repeat(1, 1, q.shape[1] // kv_heads, 1)
    return _attention(
        q.reshape(q.shape[0], kv_heads, -1, q.shape[3]), keys, values, mask, scores
    ).reshape(q.shape)


def _attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    """One attention operator, with as many heads in q as in the caches or a multiple of them."""
    scale = scores.scale or q.shape[-1] ** -0.5
    slots = mask.shape[3]
    keys, values = keys[:, :, :slots], values[:, :, :slots]
    if scores.cap:  # torch's attention has none
        weights = (capped(q @ keys.transpose(2, 3) * scale, scores.cap) + mask).float().softmax(-1)
        return weights.to(q.dtype) @ values
    return nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)


def attend_whole(q: Tensor, k: Tensor, v: Tensor, scores: Scores, window: int = 0) -> Tensor:
    """Grouped-query attention of whole sequences, each token to those up to itself, or to
    ``window`` of them."""
    if not (scores.cap or window):
        return nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True, scale=scores.scale
        )
    at = torch.arange(q.shape[2], device=q.device)
    before = at[:, None] - at
    hidden = (before < 0) | (before >= window) if window else before < 0
    group = q.shape[1] // k.shape[1]
    mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill(hidden, MASKED)[
        None, None
    ]
    return _attention(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), mask, scores)


class Attention(nn.Module):
    """Self-attention over static caches."""

    def __init__(self, geometry: Geometry, kind: str = FULL) -> None:
        super().__init__()
        self.head_dim, self.rotates, self.norm_last = (
            geometry.head_dim,
            kind != UNROTATED,
            geometry.qk_norm_rotated,
        )
        self.window = geometry.window if kind == SLIDING else 0
        self.local = kind == SLIDING and geometry.local_theta > 0
        self.scores = Scores(geometry.attention_scale or None, geometry.attention_cap)
        hidden, width = geometry.hidden_size, geometry.num_heads * geometry.head_dim
        kv_width = geometry.num_kv_heads * geometry.head_dim
        self.q_proj = nn.Linear(hidden, width, bias=geometry.qkv_bias)
        self.k_proj = nn.Linear(hidden, kv_width, bias=geometry.qkv_bias)
        self.v_proj = nn.Linear(hidden, kv_width, bias=geometry.qkv_bias)
        self.o_proj = nn.Linear(width, hidden, bias=geometry.output_bias)
        self.q_norm, self.k_norm = (self._norm(geometry, size) for size in (width, kv_width))

    def _norm(self, geometry: Geometry, width: int) -> nn.Module:
        if geometry.qk_norm_joint:
            return JointNorm(width, geometry.rms_norm_eps, geometry.wide_norms)
        return (
            RMSNorm(self.head_dim, geometry.rms_norm_eps, geometry.wide_norms)
            if geometry.qk_norm
            else nn.Identity()
        )

    def write_kv(self, x: Tensor, inputs: Inputs, cache: KV) -> KV:
        """Project x [B, n, hidden] to keys and values, and write them into the caches."""
        k, v = self._heads(x, (self.k_proj, self.v_proj))
        return self._write(k, v, inputs, cache)

    def forward(self, x: Tensor, inputs: Inputs, cache: KV) -> tuple[Tensor, KV]:
        """Return the attention output [B, n, hidden] and the written caches."""
        q, k, v = self._heads(x, (self.q_proj, self.k_proj, self.v_proj))
        q = self._turned(q, self.q_norm, inputs)
        if inputs.whole:
            y = attend_whole(q, self._turned(k, self.k_norm, inputs), v, self.scores, self.window)
        else:
            cache = self._write(k, v, inputs, cache)
            y = attend(
                q, *cache, inputs.within(self.window) if self.window else inputs, self.scores
            )
        return self.o_proj(y.transpose(1, 2).flatten(2)), cache

    def _heads(self, x: Tensor, layers: tuple[nn.Linear, ...]) -> tuple[Tensor, ...]:
        """The outputs [B, heads, n, D] of linear layers for x [B, n, hidden]."""
        y = joint_linear(x, layers).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
        return torch.split(y, [layer.out_features // self.head_dim for layer in layers], 1)

    def _write(self, k: Tensor, v: Tensor, inputs: Inputs, cache: KV) -> KV:
        return (
            write_cache(cache[0], self._turned(k, self.k_norm, inputs), inputs.write_indices),
            write_cache(cache[1], v, inputs.write_indices),
        )

    def _turned(self, x: Tensor, norm: nn.Module, inputs: Inputs) -> Tensor:
        """Queries or keys x [B, heads, n, D], normalized and rotated."""
        x = x if self.norm_last else norm(x)
        x = rotate(x, inputs, self.local) if self.rotates else x
        return norm(x) if self.norm_last else x


class Block(nn.Module):
    """One decoder block. Maps x [B, n, hidden] and the layer's caches to the new x and the written
    caches."""

    def __init__(self, geometry: Geometry, kind: str = FULL) -> None:
        super().__init__()
        before, behind = geometry.norm_before, geometry.norm_behind
        self.input_layernorm: nn.Module = make_norm(geometry) if before else nn.Identity()
        self.self_attn = Attention(geometry, kind)
        self.post_self_attn_layernorm: nn.Module = make_norm(geometry) if behind else nn.Identity()
        self.post_attention_layernorm: nn.Module = make_norm(geometry) if before else nn.Identity()
        self.mlp: nn.Module = make_feed_forward(geometry)
        self.post_mlp_layernorm: nn.Module = make_norm(geometry) if behind else nn.Identity()

    def forward(self, x: Tensor, inputs: Inputs, cache: KV) -> tuple[Tensor, KV]:
        x, cache = self.attend(x, inputs, cache)
        return self.feed_forward(x), cache

    def attend(self, x: Tensor, inputs: Inputs, cache: KV) -> tuple[Tensor, KV]:
        """The first half: x with what the tokens before each add, and the written cache."""
        attended, cache = self.self_attn(self.input_layernorm(x), inputs, cache)
        return x + self.post_self_attn_layernorm(attended), cache

    def feed_forward(self, x: Tensor) -> Tensor:
        """The second half: the MLP, for each token alone."""
        added: Tensor = self.post_mlp_layernorm(self.mlp(self.post_attention_layernorm(x)))
        return x + added

    def write_kv(self, x: Tensor, inputs: Inputs, cache: KV) -> KV:
        """Write the block's keys and values for x [B, n, hidden] without computing its output."""
        return self.self_attn.write_kv(self.input_layernorm(x), inputs, cache)


def make_norm(geometry: Geometry) -> RMSNorm:
    """A norm of hidden states."""
    return RMSNorm(geometry.hidden_size, geometry.rms_norm_eps, geometry.wide_norms)


class Backbone(nn.Module):
    """Embeddings, blocks and final norm: ``model.*`` in a checkpoint."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.embed_tokens = Embeddings(geometry)
        layers = range(geometry.num_layers)
        self.layers = nn.ModuleList(
            Block(geometry.of_layer(layer), geometry.kind(layer)) for layer in layers
        )
        self.norm = make_norm(geometry)


class Decoder(nn.Module):
    """The base model."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry
        self.model = Backbone(geometry)
        self.lm_head = nn.Linear(geometry.hidden_size, geometry.vocab_size, bias=False)
        if geometry.tied_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, input_ids: Tensor, inputs: Inputs, caches: list[KV]
    ) -> tuple[Tensor, list[KV]]:
        """Run all layers on ``input_ids`` [B, n]. Returns logits [B, n, V] and the written caches,
        a pair for each layer."""
        x = self.model.embed_tokens(input_ids)
        written = []
        for block, cache in zip(self.model.layers, caches, strict=True):
            x, cache = block(x, inputs, cache)
            written.append(cache)
        return capped(self.lm_head(self.model.norm(x)), self.geometry.logit_cap), written
