"""The tokens of one round: the root (the last committed token) and what was drafted behind it."""

import numpy as np
from numpy.typing import NDArray


class TokenTree:
    """Nodes in the order they were drafted; node i sits at slot ``root slot + i``. A chain has one node in each level."""

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self.depths = [0]
        self.logprobs = [0.0]
        """Cumulative log-probability of each node's path under the draft."""
        self.scores = [0.0]
        """Cumulative score of each node's path: what it is ranked by."""
        self.margins = [0.0]
        """How far each node's score lies above its best sibling's, drafted or not."""
        self.is_chain = True

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, parent: int, logprob: float, score: float | None = None, margin: float = 0.0) -> int:
        """Append a child of ``parent`` with its own log-probability, score (the same if not given) and margin; its index."""
        node = len(self.tokens)
        self.is_chain = self.is_chain and parent == node - 1
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.logprobs.append(self.logprobs[parent] + logprob)
        self.scores.append(self.scores[parent] + (logprob if score is None else score))
        self.margins.append(margin)
        return node

    def children(self, node: int) -> list[int]:
        """Indices of a node's children, in the order they were drafted."""
        return [child for child in range(node + 1, len(self.parents)) if self.parents[child] == node]

    def path(self, node: int) -> list[int]:
        """Indices from the root's child down to ``node``; empty for the root."""
        nodes = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def visible(self, first: int = 0) -> NDArray[np.bool_]:
        """[len - first, len]: which nodes each node from ``first`` on sees, its ancestors and itself."""
        seen = np.eye(len(self), dtype=np.bool_)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                seen[node] |= seen[parent]
        return seen[first:]
