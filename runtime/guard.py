"""Never slower than plain decoding: the guard measures both and rests drafting while it does not pay."""

PROBE_EVERY = 64
"""Of so many rounds one is plain, so that the cost of plain decoding stays known as the text grows."""
TRIAL = 12
"""Rounds with drafting before it is judged."""
LONGEST_REST = 1024
MEMORY = 0.9
"""Per round; about the last ten rounds count."""


class Guard:
    """Compares seconds per token of rounds with and without drafting.

    Ask :meth:`allows` at the start of a round and tell :meth:`record` at its end. When drafting was slower it rests, each time
    twice as long, and is then tried again.
    """

    def __init__(self) -> None:
        self.rests = 0
        self._rest_left = 0
        self._next_rest = 16
        self._rounds = 0
        self._trial = 0
        self._seconds = {True: 0.0, False: 0.0}
        self._tokens = {True: 0.0, False: 0.0}

    @property
    def resting(self) -> bool:
        return self._rest_left > 0

    def allows(self) -> bool:
        """Whether this round may draft."""
        if self._rest_left > 0:
            return False
        return self._rounds % PROBE_EVERY != 1

    def rate(self, drafting: bool) -> float:
        """Tokens per second of late, 0 while unknown."""
        seconds = self._seconds[drafting]
        return self._tokens[drafting] / seconds if seconds else 0.0

    def record(self, drafting: bool, tokens: int, seconds: float) -> None:
        """A round ended: it took ``seconds`` for ``tokens`` tokens."""
        self._rounds += 1
        self._seconds[drafting] = self._seconds[drafting] * MEMORY + seconds
        self._tokens[drafting] = self._tokens[drafting] * MEMORY + tokens
        if self._rest_left > 0:
            self._rest_left -= 1
            return
        self._trial += drafting
        if self._trial < TRIAL or not self._seconds[False]:
            return
        if self.rate(True) < self.rate(False):
            self.rests += 1
            self._rest_left = self._next_rest
            self._next_rest = min(2 * self._next_rest, LONGEST_REST)
            self._trial = 0
            self._seconds[True] = self._tokens[True] = 0.0
        else:
            self._next_rest = 16
