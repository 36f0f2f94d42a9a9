"""What an engine is to the decode loop, whatever runs it."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from eesd.runtime.slab import KVSlab


class Outputs(NamedTuple):
    """Results for n nodes; views that the next ``forward`` of the same binding overwrites.

    ``logits`` [n, V] float32; from a draft engine also the K most likely tokens, ``topk_ids`` and ``topk_logprobs`` [n, K].
    """

    logits: NDArray[np.float32]
    topk_ids: NDArray[np.int64] | None
    topk_logprobs: NDArray[np.float32] | None


class Binding(Protocol):
    """An engine tied to one KV slab."""

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slot: int,
        base: int = 0,
        visible: NDArray[np.bool_] | None = None,
    ) -> Outputs:
        """Run n tokens, writing their keys and values at ``slot`` .. ``slot + n - 1``.

        Every token sees the slots below ``base``; ``visible`` [n, m] says which of the slots ``base`` .. ``base + m - 1``
        it sees besides. Without ``visible`` the tokens are a chain: each sees every slot up to its own.
        """
        ...


class Engine(Protocol):
    """A loaded draft or verify graph."""

    def bind(self, slab: KVSlab) -> Binding:
        """Tie the engine to a slab; many bindings may live side by side."""
        ...
