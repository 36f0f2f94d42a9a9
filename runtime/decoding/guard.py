"""Never slower than plain decoding: the guard counts what each drafter gains, and pauses those that gain nothing."""

from collections import deque
from statistics import median, median_low

from eesd.controllers import RoundOutcome

ALLOWANCE = 0.0045
"""Plain steps that a drafter may lose for each token that is decoded."""
STAKE = 0.8
"""Plain steps that it may lose at first, and that it saves in a pause at most beyond the price of a trial."""
TRIAL = 3
"""Rounds that a trial can pay for. A single one would say little, and each trial disturbs a plain round."""
MARGIN = 0.05
"""Plain steps that a drafting round must gain: by less, measurements err, and less is worth little."""
DOUBT = 4.0
"""Luck is believed as if so many further rounds had brought what was expected."""
FORGOTTEN = 128
SAVED, SPENT = 8.0, 0.04
MEMORY = 48
"""About so many of the last drafting rounds make the gain."""
PROBE, FIRST_INTERVAL, LONGEST_INTERVAL = 4, 16, 256
"""Plain rounds that measure plain decoding while a drafter drafts, and rounds between two such probes."""
NEAR = 4
"""Drafting rounds before and behind plain ones that are compared with them."""
SLOWER = 1.3
"""If the last rounds took so many times what they usually do, plain decoding is measured again."""


class Prices:
    """What parts of rounds cost in plain steps, by a count: the median of the last samples."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {0: 0.0}

    def add(self, count: int, price: float) -> None:
        samples = self._samples.setdefault(count, deque(maxlen=4 * NEAR + 1))
        samples.append(price)
        self._medians[count] = median_low(samples)

    def __contains__(self, count: int) -> bool:
        return count in self._medians

    def __getitem__(self, count: int) -> float:
        return self._medians[count]


class Account:
    """What one drafter gains."""

    def __init__(self, draft: Prices, verify: Prices) -> None:
        self.paused = False
        self.pauses = 0
        self._draft, self._verify = draft, verify
        self._rounds = self._expected = self._luck = 0.0
        self._shapes: dict[tuple[int, int], float] = {}
        self._budget = STAKE
        self._saved = 0.0

    @property
    def gain(self) -> float:
        """Plain steps that a drafting round gains: what it is expected to bring minus its price, and the luck it had."""
        rounds = self._rounds
        if not rounds:
            return 0.0
        price = sum(weight * (self._draft[steps] + self._verify[nodes]) for (steps, nodes), weight in self._shapes.items())
        return (self._expected - price) / rounds + self._luck / (rounds + DOUBT) - MARGIN

    def _age(self, keep: float) -> None:
        self._rounds, self._expected, self._luck = self._rounds * keep, self._expected * keep, self._luck * keep
        self._shapes = {shape: weight * keep for shape, weight in self._shapes.items() if weight > 0.01 * self._rounds}
        self._rounds = sum(self._shapes.values())

    def earn(self, tokens: float) -> None:
        self._budget += ALLOWANCE * tokens
        price = 0.1
        if self.paused:
            self._age(1 - tokens / FORGOTTEN)
            spent = min(self._saved, SPENT * tokens)
            self._saved -= spent
            self._budget += spent
            price = TRIAL * min(max(-self.gain, 0.0), 0.5) + 0.1
            self.paused = self._budget < price
        self._budget = min(self._budget, STAKE + price)

    def note(self, tokens: float, expected: float, shape: tuple[int, int]) -> None:
        self._age(1 - 1 / MEMORY)
        self._rounds += 1
        self._shapes[shape] = self._shapes.get(shape, 0.0) + 1
        self._expected += expected
        self._luck += tokens - expected
        gain = self.gain
        self._saved = min(self._saved + max(gain, 0.0), SAVED)
        if gain < 0:
            self._budget = max(self._budget + gain, -STAKE)
            if self._budget < 0:
                self.paused = True
                self.pauses += 1


class Guard:
    def __init__(self) -> None:
        self._draft, self._verify = Prices(), Prices()
        self._accounts = {name: Account(self._draft, self._verify) for name in ("exit", "text")}
        self._plain: list[float] = []
        self._block: list[float] = []
        self._level = 0.0
        self._recent: deque[tuple[RoundOutcome, float]] = deque(maxlen=NEAR)
        self._slow: deque[float] = deque(maxlen=2 * NEAR)
        self._near = 0
        self._interval = FIRST_INTERVAL
        self._until_probe = FIRST_INTERVAL
        self._probing = PROBE
        self._behind = True

    @property
    def pauses(self) -> int:
        return sum(account.pauses for account in self._accounts.values())

    def allows(self, drafter: str) -> bool:
        return not self._probing and not self._accounts[drafter].paused

    def record(self, outcome: RoundOutcome, expected: float, seconds: float) -> None:
        tokens = outcome.accepted + 1
        if not outcome.nodes:
            self._plainly(seconds)
        elif self._level:
            self._drafted(outcome, seconds)
            self._accounts["exit" if outcome.steps else "text"].note(tokens, expected, (outcome.steps, outcome.nodes))
        for account in self._accounts.values():
            account.earn(tokens)

    def _compare(self, outcome: RoundOutcome, seconds: float) -> None:
        level = self._level
        if outcome.steps:
            self._draft.add(outcome.steps, outcome.draft_seconds / level)
            seconds -= outcome.draft_seconds
        self._verify.add(outcome.nodes, seconds / level)

    def _drafted(self, outcome: RoundOutcome, seconds: float) -> None:
        if self._near > 0 or outcome.steps not in self._draft or outcome.nodes not in self._verify:
            self._compare(outcome, seconds)
        self._recent.append((outcome, seconds))
        self._near -= 1
        self._until_probe -= 1
        self._behind = True
        self._slow.append(seconds / self._level / (self._draft[outcome.steps] + self._verify[outcome.nodes]))
        changed = len(self._slow) == 2 * NEAR and not 1 / SLOWER < median(self._slow) < SLOWER
        if self._until_probe <= 0 or changed:
            self._probing = PROBE
            self._interval = FIRST_INTERVAL if changed else min(2 * self._interval, LONGEST_INTERVAL)
            self._until_probe = self._interval

    def _plainly(self, seconds: float) -> None:
        self._probing = max(self._probing - 1, 0)
        if self._behind:
            self._behind = False
            self._block = []
            return
        self._block.append(seconds)
        if len(self._block) >= PROBE - 1:
            self._block = self._block[-5:]
            self._level = median(self._block)
            for outcome, taken in self._recent:
                self._compare(outcome, taken)
            self._recent.clear()
            self._slow.clear()
            self._near = NEAR
