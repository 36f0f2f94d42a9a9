"""The suffix automaton finds the same as a search of the whole text."""

from collections.abc import Sequence

import numpy as np
import pytest

from eesd.controllers import TextStep
from eesd.runtime.decoding.text_drafter import Continuation, Match, SuffixAutomaton

pytestmark = pytest.mark.fast

Text = tuple[int, ...]


def made(text: Sequence[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.extend(token)
    return automaton


def texts(count: int = 150, longest: int = 30) -> list[Text]:
    """Random texts over alphabets of all sizes. The smallest ones repeat often."""
    random = np.random.default_rng(0)
    return [
        tuple(random.integers(1 + n % 6, size=random.integers(longest)).tolist())
        for n in range(count)
    ]


def ends(text: Text, part: Text) -> list[int]:
    """The end positions of the occurrences of a part."""
    return [end for end in range(len(part), len(text) + 1) if text[end - len(part) : end] == part]


def searched(text: Text, part: Text, most: int) -> list[Continuation]:
    """The continuation after ``part``, by definition."""
    path: list[Continuation] = []
    while len(path) < most:
        while part and ends(text, part) == [len(text)]:
            part = part[1:]
        followed = [text[end] for end in ends(text, part) if end < len(text)] if part else []
        if not followed:
            break
        token = max(followed, key=lambda one: (followed.count(one), ends(text, (*part, one))[-1]))
        path.append(Continuation(token, TextStep(len(part), followed.count(token), len(followed))))
        part = (*part, token)
    return path


def test_the_longest_repeated_suffix_is_found_at_every_token() -> None:
    for text in texts():
        automaton = SuffixAutomaton()
        for end in range(len(text)):
            automaton.extend(text[end])
            so_far = text[: end + 1]
            expected = max(n for n in range(end + 1) if not n or len(ends(so_far, so_far[-n:])) > 1)
            assert automaton.repeated().length == expected


def test_continuations_are_those_of_a_search() -> None:
    compared = 0
    for text in texts():
        match = (automaton := made(text)).repeated()
        found = [step for _, step in zip(range(12), automaton.continuations(match), strict=False)]
        assert found == searched(text, text[len(text) - match.length :], 12)
        compared += len(found)
    assert compared > 500


def test_another_texts_end_is_found() -> None:
    random = np.random.default_rng(1)
    found = set()
    for text in texts():
        query = tuple(random.integers(4, size=9).tolist())
        expected = max(n for n in range(10) if not n or ends(text, query[-n:]))
        automaton = made(text)
        match = automaton.follow(Match(0, 0), query)
        found.add(expected)
        assert match.length == expected
        path = [step for _, step in zip(range(5), automaton.continuations(match), strict=False)]
        assert path == searched(text, query[9 - expected :], 5)
    assert found >= set(range(5))


@pytest.mark.parametrize("period", [1, 3, 500])
def test_a_token_costs_a_bounded_number_of_states(period: int) -> None:
    """At most two states per token. A repetition is continued without end."""
    automaton = made([i % period for i in range(2000)])
    assert len(automaton._next) <= 2 * 2000
    path = [
        step.token
        for _, step in zip(range(3000), automaton.continuations(automaton.repeated()), strict=False)
    ]
    assert path == [(2000 + i) % period for i in range(3000)]
