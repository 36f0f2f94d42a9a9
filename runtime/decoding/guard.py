"""Never slower than plain decoding: the guard measures both and rests drafting while it does not pay."""

from collections import deque
from statistics import fmean, median, stdev

TRIAL = 16
"""Drafting rounds between two judgements."""
WINDOW = 64
"""Drafting rounds that a judgement looks back over."""
PROBE_EVERY = 64
"""Of so many rounds one is plain, so that the cost of plain decoding stays known as the text grows."""
FIRST_PROBES = 3
"""Probes that come early, every ``TRIAL / 2`` rounds: one alone may be an outlier."""
FIRST_REST, LONGEST_REST = 16, 1024
SURE = 1.5
"""Standard errors below zero that the mean saving must lie for a rest."""


class Guard:
    """Compares seconds per token of rounds with and without drafting.

    Ask :meth:`allows` at the start of a round and tell :meth:`record` at its end. Every ``TRIAL`` drafting rounds it asks how
    much time each of the last ``WINDOW`` saved against plain decoding. Drafting rests when the mean saving is clearly
    below zero (``SURE``), so that bad luck within a few rounds, or one round that the machine slowed, does not stop it. A
    rest is twice as long as the one before, and half as long after each good judgement.
    """

    def __init__(self) -> None:
        self.rests = 0
        self._rest_left = 0
        self._next_rest = FIRST_REST
        self._rounds = 0
        self._judged = 0
        self._drafting: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._plain: deque[tuple[int, float]] = deque(maxlen=FIRST_PROBES)

    @property
    def resting(self) -> bool:
        return self._rest_left > 0

    def allows(self) -> bool:
        """Whether this round may draft."""
        if self._rest_left > 0:
            return False
        return self._rounds % (PROBE_EVERY if len(self._plain) == FIRST_PROBES else TRIAL // 2) != 1

    def rate(self, drafting: bool) -> float:
        """Tokens per second of late, 0 while unknown."""
        if not drafting:
            return 1 / self._plain_cost() if self._plain else 0.0
        seconds = sum(seconds for _, seconds in self._drafting)
        return sum(tokens for tokens, _ in self._drafting) / seconds if seconds else 0.0

    def record(self, drafting: bool, tokens: int, seconds: float) -> None:
        """A round ended: it took ``seconds`` for ``tokens`` tokens."""
        self._rounds += 1
        if not drafting:
            self._plain.append((tokens, seconds))
            self._rest_left = max(self._rest_left - 1, 0)
            return
        self._drafting.append((tokens, seconds))
        self._judged += 1
        if self._judged >= TRIAL and self._plain:
            self._judged = 0
            self._judge()

    def _plain_cost(self) -> float:
        """Seconds per token of plain decoding: the median of the last rounds, which an outlier does not move."""
        return median(seconds / tokens for tokens, seconds in self._plain)

    def _judge(self) -> None:
        plain = self._plain_cost()
        saved = [tokens * plain - seconds for tokens, seconds in self._drafting]
        mean = fmean(saved)
        if mean >= 0:
            self._next_rest = max(self._next_rest // 2, FIRST_REST)
        elif mean + SURE * stdev(saved) / len(saved) ** 0.5 < 0:
            self.rests += 1
            self._rest_left = self._next_rest
            self._next_rest = min(2 * self._next_rest, LONGEST_REST)
            self._drafting.clear()
