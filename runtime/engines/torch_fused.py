"""Decoder blocks of the torch engine on a GPU: the modules of ``model/`` with the kernels of ``torch_block_kernels.py``.

A block has four matrix products, of joined weights, instead of seven, and six kernels beside them instead of some fifty.
Calls of more tokens than a round has, as for a prompt, use torch's attention.

It needs Triton, so it is imported only where that works.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from eesd.model.decoder import KV, Attention, Block, Inputs, RMSNorm, attend
from eesd.model.feed_forward import MLP
from eesd.model.graphs import Draft, Verify
from eesd.model.parallel import Add, add_in_order, rank_part
from eesd.runtime.engines.torch_block_kernels import add_and_normalize, gate, normalize, rotate_and_write
from eesd.runtime.engines.torch_block_kernels import attend as attend_in_splits
from eesd.runtime.engines.torch_quantized import ComputedBefore, QuantizedLinear

MOST_NODES = 64
"""Tokens of a sequence, at most, for which attention is computed in splits."""


class FusedNorm(RMSNorm):
    """An RMSNorm in one kernel."""

    def __init__(self, norm: nn.Module) -> None:
        nn.Module.__init__(self)
        assert isinstance(norm, RMSNorm)
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return normalize(x, self.weight, self.eps)


class Joined(nn.Module):
    """Linear layers that read the same input, in one product: their outputs [..., sum of out] side by side."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        first, *_ = layers
        self.quantized = first if isinstance(first, QuantizedLinear) else None
        if self.quantized is None:
            self.weight = joined([_tensor(layer.weight) for layer in layers])
            self.bias = None if first.bias is None else joined([_tensor(layer.bias) for layer in layers])

    def forward(self, x: Tensor) -> Tensor:
        if self.quantized is not None:
            return self.quantized(x)  # type: ignore[no-any-return]
        return linear(x, self.weight, self.bias)


def _tensor(value: Tensor | nn.Module) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Tensors one behind the other, along their first dimension: a view where they lie so in memory, else a copy."""
    first, step = parts[0], parts[0].stride(0)
    begin = first.storage_offset()
    for part in parts:
        if (
            part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or part.stride() != first.stride()
            or part.storage_offset() != begin
        ):
            return torch.cat([part.detach() for part in parts])
        begin += step * len(part)
    return first.detach().as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride(), first.storage_offset())


class FusedBlock(Block):
    """A decoder block with the same weights and calls."""

    def __init__(self, block: Block, kv_only: bool, add: Add = add_in_order) -> None:
        """``kv_only``: whether only the weights for :meth:`write_kv` are there. ``add``: of what ranks' parts of it give."""
        nn.Module.__init__(self)
        self._add = add
        attention, mlp = block.self_attn, block.mlp
        assert isinstance(mlp, MLP)
        self.input_norm = FusedNorm(block.input_layernorm)
        self.norms: tuple[Tensor, Tensor] | None = None
        if isinstance(attention.q_norm, RMSNorm) and isinstance(attention.k_norm, RMSNorm):
            keys_norm = attention.k_norm.weight
            self.norms = keys_norm if kv_only else attention.q_norm.weight, keys_norm
        self.eps = self.input_norm.eps
        self.kv_proj = Joined((attention.k_proj, attention.v_proj)) if kv_only else None
        if not kv_only:
            self.qkv_proj = Joined((attention.q_proj, attention.k_proj, attention.v_proj))
            self.gate_up_proj = Joined((mlp.gate_proj, mlp.up_proj))
            self.o_proj, self.down_proj = attention.o_proj, mlp.down_proj
            self.attention_norm = FusedNorm(block.post_attention_layernorm)

    def forward(self, x: Tensor, inputs: Inputs, cache: KV) -> tuple[Tensor, KV]:
        attended, cache = self._attended(x, inputs, cache)
        x, normed = add_and_normalize(x, attended, self.attention_norm.weight, self.eps)
        return x + self._mlp(normed), cache

    def attend(self, x: Tensor, inputs: Inputs, cache: KV) -> tuple[Tensor, KV]:
        """See :meth:`Block.attend`."""
        attended, cache = self._attended(x, inputs, cache)
        return x + attended, cache

    def feed_forward(self, x: Tensor) -> Tensor:
        """See :meth:`Block.feed_forward`."""
        return x + self._mlp(self.attention_norm(x))

    def write_kv(self, x: Tensor, inputs: Inputs, cache: KV) -> KV:
        """See :meth:`Block.write_kv`."""
        projection = self.qkv_proj if self.kv_proj is None else self.kv_proj
        self._rotated(projection(self.input_norm(x)), inputs, cache)
        return cache

    def _attended(self, x: Tensor, inputs: Inputs, cache: KV) -> tuple[Tensor, KV]:
        q = self._rotated(self.qkv_proj(self.input_norm(x)), inputs, cache)
        if x.shape[1] <= MOST_NODES:
            y = attend_in_splits(q, cache, inputs.attn_mask, inputs.write_indices)
        else:
            y = attend(q.transpose(1, 2), *cache, inputs).transpose(1, 2).flatten(2)
        return self._add([self.o_proj(y)]), cache

    def _rotated(self, x: Tensor, inputs: Inputs, cache: KV) -> Tensor:
        """Write keys and values of x [B, n, (H + 2 KV) D]; the queries [B, n, H, D]."""
        tables = inputs.cos, inputs.sin
        return rotate_and_write(x, tables, inputs.position_ids, inputs.write_indices, self.norms, self.eps, cache)

    def _mlp(self, x: Tensor) -> Tensor:
        return self._add([self.down_proj(gate(self.gate_up_proj(x)))])


def fuse(*modules: Draft | Verify) -> None:
    """Replace the blocks and norms that have weights, and are not replaced yet: a draft and a verify may share them.

    What its graph does not use has no weights, and stays as it is. So do models with other parts than Llama's and those with a
    head of EAGLE-3: the kernels know no others. Of a split model, this process has the part of one rank.
    """
    of_ranks: dict[tuple[int, bool], FusedBlock] = {}  # their joined weights are copies, which the modules shall share
    for module in modules:
        head = module.exit_head
        if module.geometry.other_parts or head.exit_config.eagle:
            continue
        for blocks in (module.model.layers, head.blocks):
            for index, block in enumerate(blocks):
                assert isinstance(block, Block)
                if isinstance(block, FusedBlock):
                    continue
                part, add = rank_part(block)
                if not _is_there(part.self_attn.k_proj):
                    continue
                assert isinstance(part.mlp, MLP)
                blocks[index] = fused = FusedBlock(part, not _is_there(part.mlp.down_proj), add)
                if part is not block:
                    key = _identity(part.self_attn), fused.kv_proj is None
                    blocks[index] = of_ranks.setdefault(key, fused)
        for part in (module.model, head, *head.deep):
            if not isinstance(part.norm, FusedNorm) and not part.norm.weight.is_meta:
                part.norm = FusedNorm(part.norm)


def _identity(attention: Attention) -> int:
    """What attentions have in common that share their weights."""
    for layer in (attention.k_proj, attention.q_proj):  # the second one may have the outputs of both
        if isinstance(layer, QuantizedLinear):
            return id(layer.weight)
    return attention.k_proj.weight.data_ptr()


def _is_there(layer: nn.Module) -> bool:
    return isinstance(layer, (QuantizedLinear, ComputedBefore)) or not _tensor(layer.weight).is_meta
