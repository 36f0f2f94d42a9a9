"""Draft from the text itself. The proposed tokens are those that followed earlier occurrences of
the end of the text.

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
"""A token is not proposed if the chance of its path is lower than this."""
COUNTED_LINKS = 32
"""Maximum number of states in which a new token updates the count of occurrences. Only very
repetitive texts have longer chains of suffix links. In these texts, the counts of short matches are
too low."""


class Match(NamedTuple):
    """A suffix of the text that occurred before.

    Attributes:
        state: Its state in the automaton.
        length: Its length in tokens.
    """

    state: int
    length: int


class SuffixAutomaton:
    """All substrings of a text that grows at its end. The automaton takes about three words of
    memory and amortised O(1) steps per token.

    If ``extend`` is interrupted, the automaton is damaged, and a new automaton must be made.
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
        """Return the state of a string: the longest string of ``state``, followed by ``token``. If
        that state also has longer strings, it is split."""
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
        """Count an occurrence of a state's strings, and of all their suffixes, at the end of the
        text."""
        for _ in range(COUNTED_LINKS):
            if state <= 0:
                return
            self._count[state] += 1
            self._latest[state] = self.num_tokens
            state = self._link[state]

    def repeated(self) -> Match:
        """Return the longest suffix of the text that occurred before. It has length 0 if no suffix
        occurred before."""
        state = max(self._link[self._last], 0)
        return Match(state, self._length[state])

    def follow(self, match: Match, tokens: Sequence[int]) -> Match:
        """Append ``tokens`` to a match, and return the longest suffix of the result that occurs in
        this text."""
        state, length = match
        for token in tokens:
            while state and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state = self._next[state][token]
                length = length + 1
        return Match(state, length)

    def continuations(self, match: Match) -> Iterator[tuple[int, TextStep]]:
        """Return the path after a match: tokens, each with the length and the counts of the match
        before it. The path begins with the token that followed the match most often. Then comes the
        token that followed the match and this token most often, and so on.

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
                [(token, state)] = following.items()
                total = count[state]
            else:
                token, state = max(
                    following.items(), key=lambda item: (count[item[1]], latest[item[1]])
                )
                total = sum(count[other] for other in following.values())
            yield token, TextStep(length, count[state], total)
            length = length + 1


class TextProposal(NamedTuple):
    """The text's proposal for its continuation.

    Attributes:
        tokens: The proposed path.
        steps: The length and the counts of the match before each token, which the rule uses. It is
            empty for tokens that a constraint forces.
        chances: The chance of each token, given that all tokens before it are right.
        path_chances: The chance, for each token, that this token and all tokens before it are
            right.
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
            drafted: Tokens that were drafted after the text. The proposal follows these tokens.
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
        """Return the automaton over all tokens. It is stored only when it is complete, because an
        interrupt may leave a damaged automaton."""
        automaton = self._automaton or SuffixAutomaton()
        self._automaton = None
        for token in tokens[automaton.num_tokens :]:
            automaton.extend(token)
        self._automaton = automaton
        return automaton
