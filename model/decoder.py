"""The base model as modules, which have its parameters.

Parameters have the names of Llama's in a Hugging Face checkpoint, which the description of the
model uses, too. Only the layers compute; what a block computes is in ``common/architecture.py``.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from eesd.common.architecture import EMBEDDING, Model, verify
from eesd.common.geometry import Geometry
from eesd.common.quantization import Shape
from eesd.common.shapes import NO_HEAD, graph_needs
from eesd.model.torch_ops import KV, Inputs, TorchOperations


class RMSNorm(nn.Module):
    """Root mean square normalization; statistics in float32.

    Args:
        size: Number of values.
        wide: Whether the weight is float32, whatever the type of x, and only the product is rounded
            to that type.
    """

    def __init__(self, size: int, wide: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float32 if wide else None))
        self.wide = wide

    def forward(self, x: Tensor, eps: float) -> Tensor:
        """Normalize x; ``eps`` is what is added to the mean square."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (self.weight * wide).to(x.dtype) if self.wide else self.weight * wide.to(x.dtype)


def add_modules(root: nn.Module, shapes: Mapping[str, Shape], wide: bool) -> None:
    """Add the layers that have weights of these names and shapes, with the modules between.

    ``wide`` is of the norms. Norms of queries and keys come behind the products of their attention.
    """
    names = dict.fromkeys(name.rpartition(".")[0] for name in shapes)
    for name in sorted(names, key=lambda name: name.endswith(("q_norm", "k_norm"))):
        parts, parent = name.split("."), root
        for part, child in pairwise(parts):
            if not hasattr(parent, part):
                parent.add_module(part, nn.ModuleList() if child.isdigit() else nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(parts[-1], _layer(name, shapes, wide))


def _layer(name: str, shapes: Mapping[str, Shape], wide: bool) -> nn.Module:
    size, *inputs = shapes[f"{name}.weight"]
    if not inputs:
        return RMSNorm(size, wide)
    if name == EMBEDDING:
        return nn.Embedding(size, *inputs)
    return nn.Linear(*inputs, size, bias=f"{name}.bias" in shapes)


class Decoder(nn.Module):
    """The base model."""

    model: nn.Module
    lm_head: nn.Linear

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry
        needs = graph_needs(geometry, NO_HEAD, range(geometry.num_layers))
        add_modules(self, needs.weights, geometry.wide_norms)
        if geometry.tied_embeddings:
            self.lm_head.weight = self.get_parameter(f"{EMBEDDING}.weight")

    def operations(self, inputs: Inputs, caches: Sequence[KV]) -> TorchOperations:
        """The operations of a pass, with a pair of caches for each layer."""
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
