"""Never slower than plain decoding: the guard measures both, and pauses drafting while it does not pay."""

from collections import deque
from statistics import fmean, median, stdev

TRIAL = 16
"""Drafting rounds between two judgements."""
WINDOW = 64
"""Drafting rounds that a judgement looks back over."""
PROBE_EVERY = 64
"""One round in this many is plain, so that the cost of plain decoding stays known as the text grows."""
FIRST_PROBES = 3
"""Probes that come early, one every ``TRIAL / 2`` rounds, because a single one may be an outlier."""
FIRST_PAUSE, LONGEST_PAUSE = 16, 1024
"""Rounds."""
SIGNIFICANCE = 1.5
"""Drafting pauses when the mean saving is this many standard errors below zero."""


class Guard:
    """Compares seconds per token of rounds with and without drafting.

    Call :meth:`allows` at the start of a round and :meth:`record` at its end. Every ``TRIAL`` drafting rounds it computes how
    much time each of the last ``WINDOW`` saved against plain decoding. It pauses drafting when the mean saving is clearly
    below zero, so that bad luck within a few rounds, or one round that the machine slowed, does not. Each pause is twice as
    long as the one before; each good judgement halves the next.

    Attributes:
        pauses: Number of pauses so far.
    """

    def __init__(self) -> None:
        self.pauses = 0
        self._pause_left = 0
        self._next_pause = FIRST_PAUSE
        self._rounds = 0
        self._unjudged = 0
        self._drafting: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._plain: deque[tuple[int, float]] = deque(maxlen=FIRST_PROBES)

    @property
    def paused(self) -> bool:
        return self._pause_left > 0

    def allows(self) -> bool:
        """Whether this round may draft."""
        if self._pause_left > 0:
            return False
        return self._rounds % (PROBE_EVERY if len(self._plain) == FIRST_PROBES else TRIAL // 2) != 1

    def rate(self, drafting: bool) -> float:
        """Recent tokens per second with or without drafting; 0 while unknown."""
        if not drafting:
            return 1 / self._plain_cost() if self._plain else 0.0
        seconds = sum(seconds for _, seconds in self._drafting)
        return sum(tokens for tokens, _ in self._drafting) / seconds if seconds else 0.0

    def record(self, drafting: bool, tokens: int, seconds: float) -> None:
        """Note a round that took ``seconds`` for ``tokens`` tokens."""
        self._rounds += 1
        if not drafting:
            self._plain.append((tokens, seconds))
            self._pause_left = max(self._pause_left - 1, 0)
            return
        self._drafting.append((tokens, seconds))
        self._unjudged += 1
        if self._unjudged >= TRIAL and self._plain:
            self._unjudged = 0
            self._judge()

    def _plain_cost(self) -> float:
        """Seconds per token of plain decoding: the median of the last rounds, which an outlier does not move."""
        return median(seconds / tokens for tokens, seconds in self._plain)

    def _judge(self) -> None:
        plain = self._plain_cost()
        saved = [tokens * plain - seconds for tokens, seconds in self._drafting]
        mean = fmean(saved)
        if mean >= 0:
            self._next_pause = max(self._next_pause // 2, FIRST_PAUSE)
        elif mean + SIGNIFICANCE * stdev(saved) / len(saved) ** 0.5 < 0:
            self.pauses += 1
            self._pause_left = self._next_pause
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
            self._drafting.clear()
