"""Drafts from the text itself: what followed when its end occurred before, here or in an earlier output."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from eesd.controllers.text_rule import TextRule, TextStep
from eesd.runtime.decoding.suffix import LONGEST_CONTEXT, Continuation, SuffixAutomaton

LEAST_VALUE = 0.05
"""Chance of its path below which a token is not proposed."""
SEPARATOR = -1
"""Stands between outputs; no token has this id."""


class PastOutputs:
    """Automata over the last outputs of a process, at most ``capacity`` tokens of them.

    An automaton forgets nothing, so there are two: when the younger has half of the tokens, the elder is dropped.
    """

    def __init__(self, capacity: int) -> None:
        self._half = capacity // 2
        self._elder, self._younger = SuffixAutomaton(), SuffixAutomaton()

    @property
    def num_tokens(self) -> int:
        """Tokens kept, separators included."""
        return self._elder.num_tokens + self._younger.num_tokens

    def add(self, tokens: Sequence[int]) -> None:
        """Keep an output, of a very long one the end."""
        kept = [*tokens[-(self._half - 1) :], SEPARATOR] if self._half > 1 else []
        elder, younger = self._elder, self._younger
        if younger.num_tokens + len(kept) > self._half:
            elder, younger = younger, SuffixAutomaton()
        self._elder, self._younger = elder, SuffixAutomaton()  # an interrupt may leave a damaged automaton, so it is not kept
        for token in kept:
            younger.extend(token)
        self._elder, self._younger = elder, younger

    def continuations(self, text: Sequence[int], longer_than: int) -> Iterator[Continuation]:
        """What followed the longest match of the text's end; nothing if none is ``longer_than`` so many tokens."""
        matches = [(automaton.find(text), automaton) for automaton in (self._younger, self._elder)]
        match, automaton = max(matches, key=lambda found: found[0].length)
        if match.length > longer_than:
            for following in automaton.continuations(match):
                if following.token == SEPARATOR:
                    return
                yield following


class TextProposal(NamedTuple):
    """What the text proposes behind its end.

    Attributes:
        tokens: The path.
        steps: What the rule is told of each token.
        chances: Of each, if all before it are right.
        values: The chance that it and all before it are right.
    """

    tokens: list[int]
    steps: list[TextStep]
    chances: list[float]
    values: list[float]


NOTHING = TextProposal([], [], [], [])


@dataclass(frozen=True)
class TextDrafter:
    """What sessions share to draft from the text: the rule, and past outputs (None: look at nothing but the text)."""

    rule: TextRule
    past: PastOutputs | None


class TextIndex:
    """The automaton over one session's tokens."""

    def __init__(self) -> None:
        self._automaton: SuffixAutomaton | None = None

    def propose(self, tokens: Sequence[int], most: int, drafter: TextDrafter, drafted: Sequence[int] = ()) -> TextProposal:
        """At most ``most`` tokens that may follow ``tokens``, which begin with the last call's, and what is drafted."""
        continuations, past = self._continuations(tokens, drafted, drafter.past)
        found, value = TextProposal([], [], [], []), 1.0
        for _, (token, length, times, of) in zip(range(most), continuations, strict=False):
            step = TextStep(length, times, of, past)
            chance = drafter.rule.chance(step)
            value *= chance
            if value < LEAST_VALUE:
                break
            found.tokens.append(token)
            found.steps.append(step)
            found.chances.append(chance)
            found.values.append(value)
        return found

    def _continuations(
        self, tokens: Sequence[int], drafted: Sequence[int], past: PastOutputs | None
    ) -> tuple[Iterator[Continuation], bool]:
        """What followed the longest match, and whether it is one in the past."""
        automaton = self._extended(tokens)
        match = automaton.follow(automaton.repeated(), drafted)
        if past is not None:
            following = past.continuations([*tokens[-LONGEST_CONTEXT:], *drafted], match.length)
            first = next(following, None)
            if first is not None:
                return chain([first], following), True
        return automaton.continuations(match), False

    def _extended(self, tokens: Sequence[int]) -> SuffixAutomaton:
        """The automaton over all tokens. An interrupt may leave a damaged one, so it is kept only when it is complete."""
        automaton, self._automaton = self._automaton or SuffixAutomaton(), None
        for token in tokens[automaton.num_tokens :]:
            automaton.extend(token)
        self._automaton = automaton
        return automaton
