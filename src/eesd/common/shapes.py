"""Shapes of a model's weights and caches, computed from the description in ``architecture.py``."""

from collections.abc import Sequence
from functools import lru_cache

from eesd.common.architecture import (
    DELTA_BIAS,
    DELTA_DECAY,
    DELTA_NORM,
    DELTA_SKIP,
    DELTA_TAPS,
    DELTA_TAPS_BIAS,
    LOGIT_BIAS,
    SINKS,
    TAPS,
    XIELU,
    Block,
    Linear,
    Mixture,
    Model,
    Norm,
    Table,
    block,
    draft,
    verify,
)
from eesd.common.geometry import UNROTATED, ExitConfig, Geometry
from eesd.common.quantization import Shape

NO_HEAD = ExitConfig(layer=0, blocks=0)
"""Configuration for the weights of the base model alone."""


class Shapes:
    """A table of operations whose values are numbers of columns. It records the weights and caches
    in use.

    The operations fill these attributes.

    Attributes:
        weights: Shapes of weights by name.
        caches: Indices of caches, in the order of their first use.
        attended: Indices of caches of keys and values. Other caches hold states.
        rotates: Whether a layer uses the rotary tables of the base model.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.weights: dict[str, Shape] = {}
        self.caches: list[int] = []
        self.attended: list[int] = []
        self.rotates = False

    def embed(self, ids: int, table: Table) -> int:
        self.weights[f"{table.name}.weight"] = (self.model.geometry.vocab_size, table.columns)
        return table.columns

    def weight(self, module: str, size: int) -> int:
        self.weights[f"{module}.weight"] = (size,)
        return size

    def multiply(self, x: int, y: int, name: str) -> int:
        return x

    def times(self, x: int, module: str, size: int, name: str) -> int:
        self.weight(module, size)
        return x

    def limit(self, x: int, most: float, name: str) -> int:
        return x

    def norm(self, x: int, norm: Norm) -> int:
        if not norm.bare:
            self.weights[f"{norm.name}.weight"] = (x // norm.groups,)
        if norm.bias:
            self.weights[f"{norm.name}.bias"] = (x,)
        return x

    def scale(self, x: int, gate: int, name: str) -> int:
        return x

    def activate(self, x: int, block: Block, name: str) -> int:
        if block.geometry.activation == "xielu":
            self.weights[f"{block.prefix}{XIELU}.weight"] = (2,)
        return x

    def product(
        self,
        x: int,
        layers: Sequence[Linear],
        name: str,
        norm: Norm | None = None,
        residual: Sequence[int] = (),
        activation: str = "",
    ) -> int:
        if norm is not None:
            self.norm(x, norm)
        for layer in layers:
            self._linear(x, layer)
        return layers[0].outputs if activation else sum(layer.outputs for layer in layers)

    def _linear(self, inputs: int, layer: Linear) -> None:
        self.weights[f"{layer.name}.weight"] = (layer.outputs, inputs)
        if layer.bias:
            self.weights[f"{layer.name}.bias"] = (layer.outputs,)

    def mixture(
        self,
        x: int,
        block: Block,
        mixture: Mixture,
        name: str,
        norm: Norm | None,
        residual: Sequence[int],
    ) -> int:
        if norm and mixture.router_norm:
            self.norm(x, norm)
        self.product(x, [mixture.router], name, mixture.router_norm or norm)
        for module in filter(None, (mixture.scales, mixture.bias)):
            self.weight(module, len(mixture.experts))
        for gate, up, down in mixture.experts:
            self.product(self.product(x, [gate, up], name, activation="any"), [down], name)
        return x

    def add(self, residual: Sequence[int], y: int, name: str) -> int:
        return y

    def split(self, x: int, sizes: Sequence[int], names: Sequence[str]) -> Sequence[int]:
        return sizes

    def concat(self, parts: Sequence[int], name: str) -> int:
        return sum(parts)

    def by_heads(self, x: int, layers: Sequence[Linear], name: str) -> int:
        for layer in layers:
            self._linear(x // len(layers), layer)
        return sum(layer.outputs for layer in layers)

    def attention(self, qkv: int, block: Block, name: str, attends: bool) -> int:
        geometry = block.geometry
        for part, there in {"q": attends, "k": block.writes}.items():
            if geometry.qk_norm and there:
                self.norm(geometry.head_dim, block.norm(f"self_attn.{part}_norm"))
        if geometry.sinks and attends:
            self.weights[f"{block.prefix}{SINKS}.weight"] = (geometry.num_heads,)
        self._use(block.cache)
        self.attended.append(block.cache)
        self.rotates |= block.kind != UNROTATED and block.eagle is None
        size = geometry.latent.rank if geometry.latent else geometry.head_dim
        return geometry.num_heads * size

    def convolution(self, x: int, block: Block, name: str) -> int:
        hidden = block.geometry.hidden_size
        self.weights[f"{block.prefix}{TAPS}.weight"] = (hidden, 1, block.geometry.taps)
        self._use(*block.state_caches)
        return hidden

    def delta_rule(self, x: int, block: Block, name: str) -> int:
        rule = block.geometry.delta
        assert rule is not None
        self.weights[f"{block.prefix}{DELTA_TAPS}.weight"] = (rule.mixed, 1, rule.taps)
        sizes = {DELTA_DECAY: rule.value_heads, DELTA_BIAS: rule.value_heads}
        if rule.conv_bias:
            sizes[DELTA_TAPS_BIAS] = rule.mixed
        if rule.space:
            sizes[DELTA_SKIP] = rule.value_heads
        else:
            sizes[DELTA_NORM] = rule.value_dim
        for part, size in sizes.items():
            self.weight(f"{block.prefix}{part}", size)
        self._use(*block.state_caches)
        return rule.values

    def _use(self, *caches: int) -> None:
        self.caches += [cache for cache in caches if cache not in self.caches]

    def write_state(self, x: int, name: str) -> int:
        self._use(*self.model.state_caches)
        return x

    def carry_state(self, name: str) -> int:
        self._use(*self.model.state_caches)
        return self.model.state_width

    def parent_state(self, name: str, written: int | None = None) -> int:
        self._use(*self.model.state_caches)
        return self.model.geometry.hidden_size

    def last(self, x: int) -> int:
        return x

    def logits(self, x: int, head: Linear, norm: Norm | None, cap: float) -> int:
        if head.bias:
            self.weight(LOGIT_BIAS, head.outputs)
        return self.product(x, [head._replace(bias=False)], "logits", norm)


def block_weights(of: Block) -> dict[str, Shape]:
    """Name and shape of every weight of a block."""
    shapes = Shapes(Model(of.geometry, NO_HEAD))
    inputs = of.geometry.input_size or None
    block(shapes, of, of.geometry.hidden_size * (1 + (of.eagle is not None)), inputs)
    return shapes.weights


@lru_cache
def graph_needs(geometry: Geometry, head: ExitConfig, layers: range | None) -> Shapes:
    """The weights and caches of a graph. The result is shared, so callers must not change it.

    Args:
        geometry: Geometry of the base model.
        head: Configuration of the exit head.
        layers: Base layers of the verify graph or of one of its stages, or None for the draft
            graph.
    """
    model = Model(geometry, head)
    shapes = Shapes(model)
    if layers is None:
        draft(shapes, model, 0)
    else:
        verify(shapes, model, geometry.hidden_size, layers)
    return shapes
