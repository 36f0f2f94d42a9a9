"""The model's own text on a GPU: hundreds or thousands of rows at once, whose tokens the GPU chooses itself.

A step is one CUDA graph for all rows, whatever their positions. The host looks after a number of steps, takes the texts that
have ended, and gives their rows the next prompts. A text has the random numbers that it would have on a CPU, and draws with
them as :func:`~eesd.distill.continuing.continue_prompts` does, so it is the same text wherever both compute the same logits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, pad, rms_norm, scaled_dot_product_attention, silu

from eesd.common.geometry import Geometry
from eesd.distill.continuing import BLOCK, Writing, padded
from eesd.distill.teacher import wide_logits
from eesd.model.decoder import Block, Decoder, RMSNorm
from eesd.model.feed_forward import MLP
from eesd.model.rotary import rotary_tables

STEPS = 32
"""Steps before the host looks for texts that have ended. Until then their rows are idle."""
PREFILL_TOKENS = 1 << 15
"""Most tokens that are prefilled together. What pads shorter prompts counts, too."""
WARM_UP = 3
"""Steps before the one that is captured."""


def can_write(geometry: Geometry) -> bool:
    """Whether a model has only parts that :class:`DeviceWriter` computes: those of Llama."""
    return not geometry.other_parts and geometry.embedding_scale == 1 and not geometry.logit_cap


class DeviceWriter:
    """Writes with torch, on the decoder's device, in the type of its weights."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._layers = [_Layer.of(block) for block in decoder.model.layers if isinstance(block, Block)]

    @torch.inference_mode()
    def texts(self, writing: Writing) -> Iterator[tuple[int, list[int]]]:
        """See :class:`~eesd.distill.continuing.Writer`."""
        waiting = writing.waiting()
        if not waiting:
            return
        state = _Rows(self._decoder, self._layers, min(writing.rows or len(waiting), len(waiting)), writing)
        busy: dict[int, int] = {}
        while waiting or busy:
            free = [row for row in range(state.count) if row not in busy]
            begun = {row: waiting.pop() for row in free[: len(waiting)]}
            busy |= begun
            state.begin(begun)
            for row, text in state.run(list(busy)).items():
                yield busy.pop(row), text


@dataclass(frozen=True)
class _Layer:
    """A block's weights; those with the same input are one matrix, whose rows the block then has as its own."""

    before: RMSNorm
    qkv: tuple[Tensor, Tensor | None]
    q_norm: nn.Module
    k_norm: nn.Module
    out: nn.Linear
    behind: RMSNorm
    gate_up: tuple[Tensor, Tensor | None]
    down: nn.Linear

    @classmethod
    def of(cls, block: Block) -> "_Layer":
        attention, mlp = block.self_attn, block.mlp
        before, behind = block.input_layernorm, block.post_attention_layernorm
        assert isinstance(before, RMSNorm) and isinstance(behind, RMSNorm) and isinstance(mlp, MLP)  # see can_write()
        return cls(
            before,
            _joined(attention.q_proj, attention.k_proj, attention.v_proj),
            attention.q_norm,
            attention.k_norm,
            attention.o_proj,
            behind,
            _joined(mlp.gate_proj, mlp.up_proj),
            mlp.down_proj,
        )

    def feed_forward(self, x: Tensor) -> Tensor:
        gate, up = linear(_normed(self.behind, x), *self.gate_up).chunk(2, -1)
        added: Tensor = self.down(silu(gate) * up)
        return x + added


def _joined(*layers: nn.Linear) -> tuple[Tensor, Tensor | None]:
    weights: list[Tensor] = [layer.weight for layer in layers]
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    joint = torch.cat(weights)
    for layer, rows in zip(layers, torch.split(joint, [len(weight) for weight in weights]), strict=True):
        layer.weight = nn.Parameter(rows, requires_grad=False)  # a second copy would take half the model's memory again
    return joint, torch.cat(biases) if biases else None


def _normed(norm: RMSNorm, x: Tensor) -> Tensor:
    """The norm in one kernel where torch has one."""
    return rms_norm(x, norm.weight.shape, norm.weight, norm.eps)


class _Rows:
    """The texts of B rows and their caches [B, KV, S, D]."""

    def __init__(self, decoder: Decoder, layers: Sequence[_Layer], count: int, writing: Writing) -> None:
        self.count, self._decoder, self._layers, self._writing = count, decoder, layers, writing
        slots = max(writing.limits)
        geometry, weight = decoder.geometry, decoder.lm_head.weight
        self._group = geometry.num_heads // geometry.num_kv_heads
        self._kernel = _kernel(weight.device, self._group, geometry.head_dim)
        shape = (count, geometry.num_kv_heads, slots, geometry.head_dim)
        with torch.device(weight.device):
            self._caches = [(torch.zeros(shape, dtype=weight.dtype), torch.zeros(shape, dtype=weight.dtype)) for _ in layers]
            self._cos, self._sin = (table.to(weight.dtype) for table in rotary_tables(geometry, slots))
            self._each = torch.arange(count)
            self._slots = torch.arange(slots)
            self._texts = torch.zeros(count, slots, dtype=torch.int64)
            self._uniforms = torch.zeros(count, slots, dtype=torch.float64)
            self._tokens, self._positions, self._limits = torch.zeros(3, count, dtype=torch.int64)
            self._temperatures = torch.zeros(count)
            self._done = torch.ones(count, dtype=torch.bool)
        self._eos = torch.tensor(list(writing.eos_token_ids), dtype=torch.int64, device=weight.device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self, begun: Mapping[int, int]) -> None:
        """Put texts into rows: the index of a text for each row."""
        if not begun:
            return
        width, writing, texts = self._texts.shape[1], self._writing, list(begun.values())
        prompts, lengths = padded([writing.prompts[text] for text in texts], width)
        limits, uniforms = [writing.limits[text] for text in texts], np.zeros((len(texts), width))
        for number, (text, start) in enumerate(zip(texts, lengths.tolist(), strict=True)):
            random = writing.random(text)
            if random is not None:
                uniforms[number, start : limits[number]] = random.random(limits[number] - start)
        device = self._texts.device
        rows = torch.tensor(list(begun), device=device)
        self._texts[rows] = prompts.to(device)
        self._uniforms[rows] = torch.from_numpy(uniforms).to(device)
        self._tokens[rows] = prompts.gather(1, lengths[:, None] - 1)[:, 0].to(device)
        self._positions[rows] = lengths.to(device) - 1
        self._limits[rows] = torch.tensor(limits, device=device)
        self._temperatures[rows] = torch.tensor([float(writing.temperatures[text]) for text in texts], device=device)
        self._done[rows] = False
        longest = lengths.argsort(descending=True, stable=True).tolist()
        while longest:
            read = int(lengths[longest[0]]) - 1
            chosen = longest[: max(1, PREFILL_TOKENS // max(1, read))]
            del longest[: len(chosen)]
            if read:
                self._prefill(rows[chosen], prompts[chosen, :read].to(device))

    def _prefill(self, rows: Tensor, ids: Tensor) -> None:
        """Write the caches of some rows for the tokens [n, T]. What pads a prompt is written over before it is seen."""
        x, count = self._embedded(ids), ids.shape[1]
        cos, sin = self._cos[:count, None], self._sin[:count, None]
        for layer, (keys, values) in zip(self._layers, self._caches, strict=True):
            q, k, v = (part.transpose(1, 2) for part in self._qkv(layer, x, cos, sin))
            keys[rows, :, :count], values[rows, :, :count] = k, v
            y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = layer.feed_forward(x + layer.out(y.transpose(1, 2).flatten(2)))

    def _qkv(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, each [..., heads, D], for x [..., hidden] and cos and sin [..., 1, D / 2]."""
        geometry = self._decoder.geometry
        heads, kv_heads = geometry.num_heads, geometry.num_kv_heads
        joint = linear(_normed(layer.before, x), *layer.qkv).view(*x.shape[:-1], -1, geometry.head_dim)
        q, k, v = torch.split(joint, [heads, kv_heads, kv_heads], -2)
        both = joint[..., : heads + kv_heads, :]
        if geometry.qk_norm:
            both = torch.cat([layer.q_norm(q), layer.k_norm(k)], -2)
        first, second = both.chunk(2, -1)
        q, k = torch.split(torch.cat((first * cos - second * sin, second * cos + first * sin), -1), [heads, kv_heads], -2)
        return q, k, v

    def _embedded(self, ids: Tensor) -> Tensor:
        return embedding(ids, self._decoder.model.embed_tokens.weight)

    def run(self, busy: Sequence[int]) -> dict[int, list[int]]:
        """Take some steps. Returns the texts of the busy rows that have ended; these rows are then idle."""
        if self._texts.device.type != "cuda":
            self._step()
        else:
            graph = self._captured()
            for _ in range(STEPS):
                graph.replay()
        done, positions = self._done.tolist(), self._positions.tolist()
        ended = [row for row in busy if done[row]]
        if not ended:
            return {}
        rows = torch.tensor(ended, device=self._texts.device)
        texts = self._texts[rows].tolist()
        self._positions[rows] = 0  # an idle row reads one slot
        return {row: text[: positions[row] + 1] for row, text in zip(ended, texts, strict=True)}

    def _captured(self) -> torch.cuda.CUDAGraph:
        if self._graph is None:
            kept = [tensor.clone() for tensor in self._changed]
            for _ in range(WARM_UP):
                self._step()
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._step()
            for tensor, before in zip(self._changed, kept, strict=True):
                tensor.copy_(before)
        return self._graph

    @property
    def _changed(self) -> tuple[Tensor, ...]:
        """What a step changes, besides the caches, whose slots it would write again."""
        return self._texts, self._tokens, self._positions, self._done

    def _step(self) -> None:
        """Append a token to each text that has not ended."""
        x = self._embedded(self._tokens)
        cos, sin = self._cos[self._positions][:, None], self._sin[self._positions][:, None]
        for layer, (keys, values) in zip(self._layers, self._caches, strict=True):
            q, k, v = self._qkv(layer, x, cos, sin)
            keys[self._each, :, self._positions] = k
            values[self._each, :, self._positions] = v
            y = self._attend(q.reshape(self.count, -1, self._group, q.shape[-1]), keys, values)
            x = layer.feed_forward(x + layer.out(y.flatten(1)))
        logits = wide_logits(_normed(self._decoder.model.norm, x), self._decoder.lm_head.weight)
        at = torch.where(self._done, self._positions, self._positions + 1)
        uniforms = self._uniforms.gather(1, at[:, None])[:, 0]
        token = torch.where(self._done, self._tokens, chosen_tokens(logits, self._temperatures, uniforms))
        self._texts.scatter_(1, at[:, None], token[:, None])
        self._tokens.copy_(token)
        self._positions.copy_(at)
        self._done |= (token[:, None] == self._eos).any(1) | (at + 1 >= self._limits)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of queries [B, KV, G, D] over the slots up to each row's position."""
        if self._kernel is not None:
            return self._kernel(queries, keys, values, self._positions)
        seen = (self._slots <= self._positions[:, None])[:, None, None]
        return scaled_dot_product_attention(queries, keys, values, attn_mask=seen)


def _kernel(device: torch.device, group: int, size: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    """The kernel for such heads; None: torch computes their attention."""
    if device.type != "cuda" or size & (size - 1) or size < 16:
        return None
    try:
        from eesd.distill.decode_kernel import QUERIES, decode_attention
    except ImportError:
        return None
    return decode_attention if group <= QUERIES else None


def chosen_tokens(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
    """A token of each row [B] for logits [B, V]: the most likely one at temperature 0, else by inversion of the cumulative
    distribution, with a uniform random number for each row [B]."""
    best = logits.argmax(-1)
    warm = torch.where(temperatures > 0, temperatures.clamp_min(1e-4), 1.0)[:, None]
    weights = ((logits - logits.gather(1, best[:, None])) / warm).exp()
    blocks = pad(weights, (0, -weights.shape[1] % BLOCK)).view(len(weights), -1, BLOCK)
    ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    drawn = uniforms[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, drawn, right=True).clamp_max(ends.shape[1] - 1)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0]
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp_min(0)), 0.0)
    within = torch.searchsorted(inside.cumsum(-1, dtype=torch.float64) + before, drawn, right=True)
    # Its sums may round to less than the block's own: the last token that has a probability then is meant.
    last = (torch.arange(BLOCK, device=logits.device) * (inside > 0)).amax(-1, keepdim=True)
    sampled = block * BLOCK + torch.where(within < BLOCK, within, last)
    return torch.where(temperatures > 0, sampled[:, 0], best)
