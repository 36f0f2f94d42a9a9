"""The token tree of one round while it is drafted, level by level; and what of it goes to the verifier."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np

from eesd.controllers import DraftStep
from eesd.controllers.tree_budget import TreeBudget
from eesd.runtime.choosing import Chooser, Proposal
from eesd.runtime.engine import Outputs
from eesd.runtime.sampling import Logits
from eesd.runtime.tree import TokenTree

CHOICES = 4
"""Children of a node to choose from. Of the bundled model's greedy tokens 82 % are the first of them, 94 % among four."""


@dataclass(slots=True)
class Choice:
    """A child that was proposed: its path's score, and its node in the drafted tree if it was drafted on."""

    score: float
    parent: int
    depth: int
    proposal: Proposal
    node: int | None = None


class Growth:
    """A round's drafts. ``frontier`` are the nodes of the last level, best path first; ``steps`` counts the levels.

    Without ``budget`` all nodes of a level are drafted on and verified. With it paths are ranked by their calibrated chances:
    the ``width`` best of a level are drafted on, and :meth:`kept` chooses from everything that was ever proposed.
    """

    def __init__(self, root: int, chooser: Chooser, width: int = 1, budget: TreeBudget | None = None) -> None:
        self.tree = TokenTree(root)
        self.frontier = [0]
        self.steps = 0
        self._chooser, self._width, self._budget = chooser, width, budget
        self._families: dict[int, tuple[float, list[Choice]]] = {}

    def add_level(self, outputs: Outputs, most: int, first_row: int = 0) -> None:
        """Children of the frontier, whose draft results begin at ``first_row``: the ``most`` or ``width`` best paths stay."""
        tree, choices = self.tree, list[Choice]()
        for row, node in enumerate(self.frontier, start=first_row):
            choices += self._choices(node, outputs, row)
        choices.sort(key=lambda choice: -choice.score)
        self.frontier = []
        for choice in choices[: min(most, self._width)]:
            p = choice.proposal
            choice.node = tree.add(p.token, choice.parent, p.logprob, p.score, p.margin)
            self.frontier.append(choice.node)
        self.steps += 1

    def _choices(self, node: int, outputs: Outputs, row: int) -> list[Choice]:
        tree, budget = self.tree, self._budget
        depth, score = tree.depths[node] + 1, tree.scores[node]
        width = self._width if budget is None else max(self._width, CHOICES)
        proposals = self._chooser.propose(tree, node, outputs, row, width)
        if budget is None or not proposals:
            return [Choice(score + p.score, node, depth, p) for p in proposals]
        first = proposals[0]
        step = DraftStep(depth, exp(first.logprob), exp(tree.logprobs[node] + first.logprob), None, first.margin, len(tree))
        z, chances = budget.chances(step, [p.score for p in proposals])
        ranked = [p._replace(score=log(max(chance, 1e-12))) for p, chance in zip(proposals, chances, strict=True)]
        choices = [Choice(score + p.score, node, depth, p) for p in ranked]
        self._families[node] = z, choices
        return choices

    def last_step(self, outputs: Outputs, first: int, with_entropy: bool) -> DraftStep:
        """What a controller is told of the last level; it stems from the nodes from ``first`` on, whose results these are."""
        tree, best = self.tree, self.frontier[0]
        parent = tree.parents[best]
        return DraftStep(
            depth=self.steps,
            probability=exp(tree.logprobs[best] - tree.logprobs[parent]),
            path_probability=exp(tree.logprobs[best]),
            entropy=entropy_of(outputs.logits[parent - first]) if with_entropy else None,
            margin=tree.margins[best],
            nodes=len(tree) - 1,
        )

    def kept(self, most: int) -> TokenTree:
        """What is verified: with a budget those of all choices that it finds worth it, ``most`` at most. They are connected,
        since no path is likelier than what it goes through."""
        if self._budget is None or not self._families:
            return self.tree
        choices = [choice for _, family in self._families.values() for choice in family]
        choices.sort(key=lambda choice: (-choice.score, choice.depth))
        size = self._budget.size([exp(choice.score) for choice in choices[:most]])
        tree, places = TokenTree(self.tree.tokens[0]), {0: 0}
        for choice in sorted(choices[:size], key=lambda choice: choice.depth):
            p = choice.proposal
            place = tree.add(p.token, places[choice.parent], p.logprob, p.score, p.margin)
            if choice.node is not None:
                places[choice.node] = place
        return tree

    def judged(self, tokens: Sequence[int]) -> list[tuple[float, int | None]]:
        """What a budget learns when ``tokens`` came true behind the root: of each family on the way its first choice's score,
        and which choice was right, if any."""
        node: int | None = 0
        found: list[tuple[float, int | None]] = []
        for token in tokens:
            if node is None or node not in self._families:
                break
            z, family = self._families[node]
            right = next((i for i, choice in enumerate(family) if choice.proposal.token == token), None)
            found.append((z, right))
            node = None if right is None else family[right].node
        return found


def entropy_of(logits: Logits) -> float:
    """Entropy in nats of the softmax of ``logits`` [V]."""
    scores = logits.astype(np.float64) - logits.max()
    weights = np.exp(scores)
    total = weights.sum()
    return float(np.log(total) - (weights * scores).sum() / total)
