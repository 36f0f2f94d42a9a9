"""The token tree of one round while it is drafted, level by level; and what of it goes to the verifier."""

from collections.abc import Sequence
from math import exp, log
from typing import NamedTuple

import numpy as np

from eesd.controllers import DraftStep
from eesd.controllers.tree_budget import TreeBudget
from eesd.runtime.decoding.samplers import Proposal, SpecSampler
from eesd.runtime.decoding.sampling import Logits
from eesd.runtime.decoding.tree import TokenTree
from eesd.runtime.engines.base import StepOutputs

CHOICES = 4
"""Children of a node to choose from. Of the bundled model's greedy tokens 82 % are the first of them, 94 % among four."""


class Choice(NamedTuple):
    """A child that was proposed, with its path's score."""

    score: float
    depth: int
    parent: int
    proposal: Proposal


class Growth:
    """A round's drafts. ``frontier`` are the nodes of the last level, best path first; ``steps`` counts the levels.

    Without ``budget`` all nodes of a level are drafted on and verified. With it paths are ranked by their calibrated chances:
    the ``width`` best of a level are drafted on, and :meth:`kept` chooses from everything that was ever proposed.
    """

    def __init__(self, root: int, sampler: SpecSampler, width: int = 1, budget: TreeBudget | None = None) -> None:
        self.tree = TokenTree(root)
        self.frontier = [0]
        self.steps = 0
        self._sampler, self._width, self._budget = sampler, width, budget
        self._families: dict[int, tuple[float, list[Choice]]] = {}
        """Of each node that has children: its first one's calibration score, and all of them."""
        self._nodes: dict[tuple[int, int], int] = {}
        """The node of the drafted tree by parent and token, of the children that were drafted on."""

    def add_level(self, outputs: StepOutputs, most: int, first_row: int = 0) -> None:
        """Children of the frontier, whose draft results begin at ``first_row``: the ``most`` or ``width`` best paths stay."""
        self.steps += 1
        tree, width = self.tree, self._width
        if width == 1 and self._budget is None:
            [node] = self.frontier
            proposals = self._sampler.propose(tree, node, outputs, first_row, 1)
            self.frontier = [tree.add(p.token, node, p.logprob, p.score, p.margin) for p in proposals]
            return
        choices: list[Choice] = []
        for row, node in enumerate(self.frontier, start=first_row):
            choices += self._choices(node, outputs, row)
        choices.sort(key=_best_first)
        self.frontier = []
        for score, _, parent, p in choices[: min(most, width)]:
            node = tree.add(p.token, parent, p.logprob, score - tree.scores[parent], p.margin)
            self._nodes[parent, p.token] = node
            self.frontier.append(node)

    def _choices(self, node: int, outputs: StepOutputs, row: int) -> list[Choice]:
        tree, budget = self.tree, self._budget
        depth, score = tree.depths[node] + 1, tree.scores[node]
        width = self._width if budget is None else max(self._width, CHOICES)
        proposals = self._sampler.propose(tree, node, outputs, row, width)
        if budget is None or not proposals:
            return [Choice(score + p.score, depth, node, p) for p in proposals]
        first = proposals[0]
        step = DraftStep(depth, exp(first.logprob), exp(tree.logprobs[node] + first.logprob), None, first.margin, len(tree))
        z, chances = budget.chances(step, [p.score for p in proposals])
        pairs = zip(proposals, chances, strict=True)
        choices = [Choice(score + log(max(chance, 1e-12)), depth, node, p) for p, chance in pairs]
        self._families[node] = z, choices
        return choices

    def last_step(self, outputs: StepOutputs, first: int, with_entropy: bool) -> DraftStep:
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
        choices.sort(key=_best_first)
        size = self._budget.size([exp(choice.score) for choice in choices[:most]])
        tree, places = TokenTree(self.tree.tokens[0]), {0: 0}
        for _, _, parent, p in sorted(choices[:size], key=_by_depth):
            place = tree.add(p.token, places[parent], p.logprob, p.score, p.margin)
            if (parent, p.token) in self._nodes:
                places[self._nodes[parent, p.token]] = place
        return tree

    def followed(self, tokens: Sequence[int]) -> int:
        """How many of the accepted ``tokens`` were drafted on; without a budget all."""
        if self._budget is None:
            return len(tokens)
        node = 0
        for count, token in enumerate(tokens):
            if (node, token) not in self._nodes:
                return count
            node = self._nodes[node, token]
        return len(tokens)

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
            node = self._nodes.get((node, token))
        return found


def _best_first(choice: Choice) -> tuple[float, int]:
    """Parents come before their children, also where both are equally likely."""
    return -choice.score, choice.depth


def _by_depth(choice: Choice) -> int:
    return choice.depth


def entropy_of(logits: Logits) -> float:
    """Entropy in nats of the softmax of ``logits`` [V]."""
    scores = logits.astype(np.float64) - logits.max()
    weights = np.exp(scores)
    total = weights.sum()
    return float(np.log(total) - (weights * scores).sum() / total)
