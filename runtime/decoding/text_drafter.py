"""Drafts from the text itself: tokens that followed earlier occurrences of the text's end.

An online suffix automaton (Blumer et al. 1985) finds these occurrences, and counts them. A state
represents all substrings that end at the same places. Its suffix link leads to the longest suffix
that also ends elsewhere. So the link of the whole text's state is the longest suffix that occurred
before.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from eesd.controllers import TextStep
from eesd.controllers.text_rule import TextRule

LEAST_VALUE = 0.05
"""A token whose path has a lower chance is not proposed."""
COUNTED_LINKS = 32
"""Maximum number of states in which a new token updates the count of occurrences. Only very
repetitive texts have longer chains of suffix links; for them, the counts of short matches are too
low."""


class Match(NamedTuple):
    """A suffix of the text that occurred before.

    Attributes:
        state: Its state in the automaton.
        length: Its length in tokens.
    """

    state: int
    length: int


class Continuation(NamedTuple):
    """A token that followed a match before.

    Attributes:
        token: Its id.
        step: Length and counts of the match, for the rule.
    """

    token: int
    step: TextStep


class SuffixAutomaton:
    """All substrings of a text that grows at its end, in about three words of memory and amortised
    O(1) steps a token.

    An interrupted ``extend`` leaves the automaton damaged; make a new automaton then.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]
        """Number of occurrences of each state's strings."""
        self._latest = [0]
        """Position at which the last of these occurrences ended."""
        self._last = 0
        self.num_tokens = 0

    def extend(self, token: int) -> None:
        """Append a token."""
        self.num_tokens += 1
        current = self._new_state(self.num_tokens, {}, 0, 0)
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = current
            state = self._link[state]
        if state >= 0:
            self._link[current] = self._suffix(state, token)
        self._last = current
        self._count_occurrence(current)

    def _suffix(self, state: int, token: int) -> int:
        """The state of the longest string of ``state`` followed by ``token``. If that state also
        has longer strings, it is split."""
        found = self._next[state][token]
        if self._length[found] == self._length[state] + 1:
            return found
        clone = self._new_state(
            self._length[state] + 1,
            dict(self._next[found]),
            self._count[found],
            self._latest[found],
        )
        self._link[clone] = self._link[found]
        self._link[found] = clone
        while state >= 0 and self._next[state].get(token) == found:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _new_state(self, length: int, transitions: dict[int, int], count: int, latest: int) -> int:
        self._next.append(transitions)
        self._link.append(0)
        self._length.append(length)
        self._count.append(count)
        self._latest.append(latest)
        return len(self._next) - 1

    def _count_occurrence(self, state: int) -> None:
        """Count an occurrence, at the text's end, of a state's strings and of all their
        suffixes."""
        for _ in range(COUNTED_LINKS):
            if state <= 0:
                return
            self._count[state] += 1
            self._latest[state] = self.num_tokens
            state = self._link[state]

    def repeated(self) -> Match:
        """The longest suffix of the text that occurred before; of length 0 if there is none."""
        state = max(self._link[self._last], 0)
        return Match(state, self._length[state])

    def follow(self, match: Match, tokens: Sequence[int]) -> Match:
        """The longest suffix of a match followed by ``tokens`` that occurs in this text."""
        state, length = match
        for token in tokens:
            while state and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state = self._next[state][token]
                length = length + 1
        return Match(state, length)

    def continuations(self, match: Match) -> Iterator[Continuation]:
        """The path after a match: the token that followed the match most often, then the token that
        followed these two most often, and so on.

        Among equally frequent tokens, the latest is chosen. If the match reaches the end of the
        text, its longest suffix that was continued elsewhere takes its place, so a repetition goes
        on without end. The path ends if no such suffix is left.
        """
        state, length = match
        while True:
            while length and not self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if not length:
                return
            count = self._count
            latest = self._latest
            following = self._next[state]
            if len(following) == 1:
                [(token, chosen)] = following.items()
                of = count[chosen]
            else:
                token, chosen = max(
                    following.items(), key=lambda item: (count[item[1]], latest[item[1]])
                )
                of = sum(count[other] for other in following.values())
            yield Continuation(token, TextStep(length, count[chosen], of))
            state = chosen
            length = length + 1


class TextProposal(NamedTuple):
    """The text's proposal for its continuation.

    Attributes:
        tokens: The proposed path.
        steps: For each token, length and counts of the match before it, for the rule. Empty for
            tokens that a constraint forces.
        chances: Chance of each token, given that all tokens before it are right.
        path_chances: For each token, the chance that it and all tokens before it are right.
    """

    tokens: list[int]
    steps: list[TextStep]
    chances: list[float]
    path_chances: list[float]


NOTHING = TextProposal([], [], [], [])


class TextIndex:
    """The automaton over one session's tokens."""

    def __init__(self) -> None:
        self._automaton: SuffixAutomaton | None = None

    def propose(
        self, tokens: Sequence[int], most: int, rule: TextRule, drafted: Sequence[int] = ()
    ) -> TextProposal:
        """Propose at most ``most`` tokens.

        Args:
            tokens: The text. It must begin with the tokens of the last call.
            most: Maximum number of tokens.
            rule: Estimates their chances.
            drafted: Tokens drafted after the text; the proposal follows them.
        """
        automaton = self._extended(tokens)
        continuations = automaton.continuations(automaton.follow(automaton.repeated(), drafted))
        found = TextProposal([], [], [], [])
        value = 1.0
        for _, (token, step) in zip(range(most), continuations, strict=False):
            chance = rule.chance(step)
            value *= chance
            if value < LEAST_VALUE:
                break
            found.tokens.append(token)
            found.steps.append(step)
            found.chances.append(chance)
            found.path_chances.append(value)
        return found

    def _extended(self, tokens: Sequence[int]) -> SuffixAutomaton:
        """The automaton over all tokens. It is stored only when it is complete, because an
        interrupt may leave a damaged automaton."""
        automaton = self._automaton or SuffixAutomaton()
        self._automaton = None
        for token in tokens[automaton.num_tokens :]:
            automaton.extend(token)
        self._automaton = automaton
        return automaton
