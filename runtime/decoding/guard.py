"""Never slower than plain decoding: the guard keeps an account of what drafting gained, and pauses it when overdrawn."""

from collections import deque
from statistics import median_low

FIRST_ALLOWANCE, ALLOWANCE = 1.0, 0.01
"""Plain steps that drafting may lose before it has gained any; and how many more for each token that is decoded."""
LEAST_ALLOWANCE, LESS = 0.0025, 0.85
"""The allowance for each token after many pauses, and what each pause leaves of it. Gains restore it."""
GAINED = 2.0
"""Plain steps in the account that restore the allowance."""
LARGEST_BALANCE = 16.0
"""Plain steps. So little is lost where text changes and drafting no longer pays."""
LARGEST_SAVINGS, TRIALS = 24.0, 0.04
"""Plain steps that are saved of what was gained beyond the largest balance; and how many of them a token of a pause may spend.
A draft that has paid before is thus tried again sooner."""
TO_RESUME = 0.5
"""Plain steps in the account at which a pause ends: about what one more round of drafting may lose."""
LARGEST_LOSS, LARGEST_DEBT = 3.0, 0.5
"""Plain steps that one round can lose, and that the account can be overdrawn. More was lost to the machine, not to drafting. A
single round that loses more does not count at all."""
SLOWED = 1.5
"""If plain rounds in a pause take this many times what they took before, the machine is slower, and drafting may go on."""
LUCK = 4.0
"""Tokens, more or fewer than expected, that count as luck and not as gain or loss."""
FIRST_INTERVAL, SHORTEST_INTERVAL, LONGEST_INTERVAL = 64, 16, 256
"""Rounds between two probes. A probe is two plain rounds; the second is measured."""
SETTLED = 0.15
"""A probe that differs by a smaller share from the earlier ones confirms them."""


class Guard:
    """Allows drafting while its account is not overdrawn.

    Call :meth:`allows` at the start of a round and :meth:`record` at its end. The account is in plain steps, the time of a
    plain round. A drafting round that is expected to bring n tokens and took as long as m plain rounds adds n - m. What it
    brought beyond that, or short of it, counts only where the sum of it exceeds ``LUCK`` tokens: a few rejections in a row say
    little about drafting, but an expectation that is never met is wrong. Every token adds an allowance, less after each pause,
    so a pause ends, and all that drafting can ever lose is a small share of the time.

    Attributes:
        pauses: Number of pauses so far.
        paused: Whether drafting is paused now.
        balance: Plain steps in the account.
    """

    def __init__(self) -> None:
        self.pauses = 0
        self.paused = False
        self.balance = FIRST_ALLOWANCE
        self._allowance = ALLOWANCE
        self._savings = 0.0
        self._luck = 0.0
        """Tokens that are not in the account."""
        self._plain: deque[float] = deque(maxlen=5)
        """Seconds of plain rounds behind plain rounds. Right behind drafting they are slower: the draft took the caches."""
        self._price = 0.0
        """Plain seconds when the last pause began."""
        self._stalled = False
        """Whether the last drafting round lost more than ``LARGEST_LOSS``."""
        self._drafted: bool | None = True
        """Whether the last round drafted; None: another drafter did."""
        self._interval = FIRST_INTERVAL
        self._until_probe = 0
        """Drafting rounds before the next probe."""

    def allows(self) -> bool:
        """Whether this round may draft."""
        return not self.paused and self._until_probe > 0

    @property
    def probes(self) -> bool:
        """Whether this round shall be plain to be measured, so no other drafter may draft either."""
        return not self.paused and self._until_probe <= 0

    @property
    def plain_seconds(self) -> float:
        """Seconds of a plain round: the median of the last ones, which an outlier does not move; 0 while unknown."""
        return median_low(self._plain) if self._plain else 0.0

    def record(self, drafted: bool, tokens: float, expected: float, seconds: float) -> None:
        """Note a round.

        Args:
            drafted: Whether it ran the draft.
            tokens: Tokens that it brought.
            expected: Tokens that such a round brings on average, as far as the controller knows.
            seconds: Its time.
        """
        plain = self.plain_seconds
        if drafted:
            self._until_probe -= 1
            luck = min(max(self._luck + tokens - expected, -LUCK), LUCK)
            gained = tokens - (luck - self._luck)
            self._luck = luck
            if plain:
                self._settle(gained - seconds / plain)
        elif self._drafted is None:
            pass  # neither behind a draft of this drafter nor behind a plain round
        elif self._drafted:
            if plain:  # slower because of the draft, which therefore pays the difference
                self.balance -= min(max(seconds / plain - 1, 0.0), 1.0)
        else:
            self._measured(seconds)
        self._drafted = drafted
        self._close(tokens, plain)

    def pass_over(self, tokens: int) -> None:
        """Note a round of another drafter, which has a guard of its own, and the tokens that it brought.

        They add to the allowance, too: a pause shall end, although rounds without any draft become rare.
        """
        self._drafted = None
        self._close(tokens, self.plain_seconds)

    def _close(self, tokens: float, plain: float) -> None:
        """End a round of so many tokens: a pause begins or ends. ``plain``: seconds of a plain round when it began."""
        self._refill(tokens)
        if self.paused:
            self.paused = self.balance < TO_RESUME and self.plain_seconds < SLOWED * self._price
        elif self.balance < 0:
            self.paused, self._price = True, plain
            self.pauses += 1
            self._allowance = max(self._allowance * LESS, LEAST_ALLOWANCE)

    def _refill(self, tokens: float) -> None:
        """Add the allowance, and in a pause some of the savings; save what is beyond the largest balance."""
        spent = min(self._savings, TRIALS * tokens) if self.paused else 0.0
        balance = max(self.balance, -LARGEST_DEBT) + self._allowance * tokens + spent
        self.balance = min(balance, LARGEST_BALANCE)
        self._savings = min(self._savings - spent + balance - self.balance, LARGEST_SAVINGS)
        if self.balance > GAINED:
            self._allowance = ALLOWANCE

    def _settle(self, gained: float) -> None:
        """Add what a drafting round gained, in plain steps, unless the machine stalled in it."""
        stalled = gained < -LARGEST_LOSS
        if self._stalled or not stalled:
            self.balance += max(gained, -LARGEST_LOSS)
        self._stalled = stalled

    def _measured(self, seconds: float) -> None:
        """Note a plain round behind a plain round. The next probe comes later if this one says what is known already."""
        settled = abs(seconds - self.plain_seconds) < SETTLED * self.plain_seconds
        if self._plain:
            interval = self._interval * 2 if settled else self._interval // 2
            self._interval = min(max(interval, SHORTEST_INTERVAL), LONGEST_INTERVAL)
        self._until_probe = self._interval
        self._plain.append(seconds)
