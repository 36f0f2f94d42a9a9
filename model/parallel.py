"""A model whose weights are split over ranks: tensor parallelism (Shoeybi et al. 2019, arXiv
1909.08053).

Each rank has some heads of every attention and some columns of every MLP, or of each expert: the
modules of :meth:`~eesd.common.geometry.Geometry.on_rank`. So it computes a part of what both add to
x. The parts are added in the order of the ranks. Embeddings, norms, routers and LM heads are on
every rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from eesd.model.decoder import Decoder
from eesd.model.exit_head import ExitHead
from eesd.model.feed_forward import MLP

Add = Callable[[Tensor], Tensor]
"""Adds the parts of all ranks in their order, given this rank's. Each rank gets the sum."""


def add_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Add parts, the first ones first."""
    total, *others = parts
    for other in others:
        total = total + other
    return total


@dataclass(frozen=True)
class Split:
    """One of the ranks that share a model.

    Attributes:
        ranks: Number of ranks.
        rank: This one.
        add: Adds the parts of all.
    """

    ranks: int
    rank: int
    add: Add

    def ranges(self, sizes: Sequence[int]) -> list[slice]:
        """This rank's share of each of several ranges, which lie one after another."""
        shares, begin = [], 0
        for size in sizes:
            shares.append(
                slice(
                    begin + size * self.rank // self.ranks,
                    begin + size * (self.rank + 1) // self.ranks,
                )
            )
            begin += size
        return shares


class Summed(nn.Module):
    """The sum of what a module gives on all ranks."""

    def __init__(self, part: nn.Module, add: Add) -> None:
        super().__init__()
        self.part, self._add = part, add

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = self._add(self.part(x))
        return summed


def add_parts(decoder: Decoder, head: ExitHead, add: Add) -> None:
    """Add the parts of all ranks after attentions, after MLPs, and after the product with the deep
    state."""
    for module in (decoder, head):
        names = [
            name
            for name, _ in module.named_modules()
            if name.endswith(("self_attn.o_proj", "mlp", "deep_in_proj"))
        ]
        for name in names:
            one = module.get_submodule(name)
            if isinstance(one, MLP):  # engines join its first two products, so it stays what it is
                one.set_submodule("down_proj", Summed(one.down_proj, add))
            else:
                module.set_submodule(name, Summed(one, add))
