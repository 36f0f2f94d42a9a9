"""Never slower than plain decoding: the guard estimates what each drafter gains, and pauses one
that loses."""

from collections import deque
from statistics import median, median_low

from eesd.controllers import RoundOutcome

EXIT_HEAD = "exit"
TEXT = "text"
"""What drafts. A round counts for the exit head if it ran draft steps, otherwise for the text."""
STAKE = 0.8
ALLOWANCE = 0.0045
MOST = 8.0
"""Plain steps that a drafter may lose at first, further ones for each token that is decoded, and as
many of what it gained."""
MARGIN = 0.05
"""Plain steps that a drafting round must gain at least: measurements err, and less is worth
little."""
DOUBT = 4.0
"""Luck is believed as if so many further rounds had brought what was expected."""
MEMORY = 64
"""About so many of the last drafting rounds, or tokens of a pause, are remembered."""
TRIAL = 3
SWITCH = 0.1
"""A pause ends when so many rounds can be paid for, or the stake, and what the draft costs the
plain round behind it."""
PROBE = 4
NEAR = 4
"""Plain rounds of a probe, and drafting rounds before and behind plain ones that are compared with
them."""
PATIENCE = 3
"""Rounds of a drafter before its first pause. A first call may take ten times as long as later
ones, for which nothing was paid yet; a process whose first draft was paused for that drafted
nothing for 250 tokens."""
FIRST_INTERVAL = 16
LONGEST_INTERVAL = 256
"""Drafting rounds between two probes."""
SURE = 2.0
"""Tokens that a drafter must expect beside the bonus token to draft in a pause: of the text, whose
every token is judged also while it is paused, so what it expects is known, and a stall that cost it
its account does not keep it from what repeats."""
SLOWER = 1.3
"""If rounds take so many times what such rounds usually do, plain decoding is measured again."""


class Prices:
    """What parts of rounds cost in plain steps, by a count.

    Attributes:
        medians: The prices: medians, which stalls of the machine do not move.
    """

    def __init__(self) -> None:
        self.medians = {0: 0.0}
        self._samples: dict[int, deque[float]] = {}

    def add(self, count: int, price: float) -> None:
        """Note one. Only the last ones count; of few, the least: nothing makes a call fast."""
        samples = self._samples.setdefault(count, deque(maxlen=4 * NEAR + 1))
        samples.append(price)
        self.medians[count] = median_low(samples) if len(samples) >= NEAR else min(samples)

    def forget(self) -> None:
        """Let the next samples alone make the prices; until they come, the old prices hold."""
        self._samples.clear()


class Account:
    """What one drafter may lose, and what its rounds gain.

    Attributes:
        paused: Whether it is paused now.
    """

    def __init__(self, draft: Prices, verify: Prices) -> None:
        self.paused = False
        self._draft = draft
        self._verify = verify
        self._rounds: dict[tuple[int, int], float] = {}
        """How many of the remembered rounds had so many draft steps and nodes."""
        self._expected = self._luck = 0.0
        """Tokens that these rounds were expected to bring, and what they brought beyond that."""
        self._budget = STAKE
        self._rounds_seen = 0

    @property
    def gain(self) -> float:
        """Plain steps that a round gains beyond ``MARGIN``: the tokens that it brings minus what it
        costs; 0 while unknown."""
        rounds = sum(self._rounds.values())
        if not rounds:
            return 0.0
        draft = self._draft.medians
        verify = self._verify.medians
        cost = sum(
            [
                weight * (draft[steps] + verify[nodes])
                for (steps, nodes), weight in self._rounds.items()
            ]
        )
        return (self._expected - cost) / rounds + self._luck / (rounds + DOUBT) - MARGIN

    def drafted(self, outcome: RoundOutcome) -> bool:
        """Note a round of this drafter. Returns whether a pause begins."""
        self._forget(1.0)
        shape = outcome.steps, outcome.nodes
        self._rounds[shape] = self._rounds.get(shape, 0.0) + 1
        self._expected += outcome.expected
        self._luck += outcome.accepted + 1 - outcome.expected
        self._rounds_seen += 1
        self._budget = min(max(self._budget + self.gain, -2 * STAKE), MOST)
        if self._rounds_seen == PATIENCE:  # by now prices are known
            self._budget = max(self._budget, STAKE + PATIENCE * self.gain)
        pauses = self._budget < 0 and self._rounds_seen >= PATIENCE
        self.paused = self.paused or pauses
        return pauses

    def earn(self, tokens: int) -> None:
        """Add the allowance for tokens of any round. A pause ends when it pays for a trial."""
        self._budget = min(self._budget + ALLOWANCE * tokens, MOST)
        if self.paused:
            if sum(self._rounds.values()) > DOUBT:
                self._forget(tokens)
            self.paused = self._budget < SWITCH + min(TRIAL * max(-self.gain, 0.0), STAKE)

    def _forget(self, age: float) -> None:
        keep = max(1 - age / MEMORY, 0.0)
        self._rounds = {
            shape: weight * keep for shape, weight in self._rounds.items() if weight > 0.01
        }
        self._expected = self._expected * keep
        self._luck = self._luck * keep


class Guard:
    """Allows a drafter while its account is not overdrawn.

    Tokens are counted, and need no estimate but that of luck. Seconds are noisy, and change with
    the load of the machine. So no round is charged what it took: a round is charged the median
    *price* of such rounds, in plain steps, and prices are measured only close to plain rounds, in
    the same load.

    Attributes:
        pauses: Number of pauses so far.
        plain_step: Seconds of a plain round; 0 while unknown.
    """

    def __init__(self) -> None:
        self.pauses = 0
        self._draft = Prices()
        self._verify = Prices()
        """By draft steps, and by nodes (with all that a round does beside its draft)."""
        self._accounts = {name: Account(self._draft, self._verify) for name in (EXIT_HEAD, TEXT)}
        self._plain: deque[float] = deque(maxlen=5)
        """Seconds of plain rounds since the last draft, but for the first: the draft took the
        processor's caches from it."""
        self.plain_step = 0.0
        self._recent: deque[RoundOutcome] = deque(maxlen=NEAR)
        """The last drafting rounds."""
        self._pace: deque[float] = deque(maxlen=2 * NEAR)
        """How many times their usual seconds the last drafting rounds took."""
        self._drafts_since = 0
        """Drafting rounds since plain rounds were measured."""
        self._interval = FIRST_INTERVAL
        self._probing = PROBE
        """Plain rounds that the probe still needs."""
        self._behind_draft = True

    def allows(self, drafter: str, sure: float = 0.0) -> bool:
        """Whether ``drafter`` may draft in this round. ``sure``: tokens that it expects beside the
        bonus token, as far as is known without drafting. While plain decoding is measured, nothing
        may draft."""
        return not self._probing and (sure >= SURE or not self._accounts[drafter].paused)

    def observe(self, outcome: RoundOutcome) -> None:
        """Note a committed round."""
        if not outcome.nodes:
            self._measure_plain(outcome.seconds)
        elif self.plain_step:
            self._measure_draft(outcome)
            account = self._accounts[EXIT_HEAD if outcome.steps else TEXT]
            self.pauses += account.drafted(outcome)
            if account.paused:  # the trial after the pause is not judged by the load before it
                (self._draft if outcome.steps else self._verify).forget()
        for account in self._accounts.values():
            account.earn(outcome.accepted + 1)

    def _measure_plain(self, seconds: float) -> None:
        self._probing = max(self._probing - 1, 0)
        if self._behind_draft:
            self._behind_draft = False
            self._plain.clear()
            return
        self._plain.append(seconds)
        if len(self._plain) >= PROBE - 1:
            self.plain_step = median(self._plain)
            for outcome in self._recent:
                self._compare(outcome)
            self._recent.clear()
            self._pace.clear()
            self._drafts_since = 0

    def _measure_draft(self, outcome: RoundOutcome) -> None:
        draft = self._draft.medians
        verify = self._verify.medians
        self._behind_draft = True
        self._drafts_since += 1
        if self._drafts_since <= NEAR or outcome.steps not in draft or outcome.nodes not in verify:
            self._compare(outcome)
        self._recent.append(outcome)
        usual = self.plain_step * (draft[outcome.steps] + verify[outcome.nodes])
        self._pace.append(outcome.seconds / usual)
        changed = len(self._pace) == 2 * NEAR and not 1 / SLOWER < median(self._pace) < SLOWER
        if changed or self._drafts_since >= self._interval:
            self._probing = PROBE
            self._interval = (
                FIRST_INTERVAL if changed else min(2 * self._interval, LONGEST_INTERVAL)
            )

    def _compare(self, outcome: RoundOutcome) -> None:
        """Note the price of a drafting round that is close to plain ones."""
        drafting = outcome.draft_seconds if outcome.steps else 0.0
        if outcome.steps:
            self._draft.add(outcome.steps, drafting / self.plain_step)
        self._verify.add(outcome.nodes, (outcome.seconds - drafting) / self.plain_step)
