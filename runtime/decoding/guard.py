"""The guard keeps decoding from being slower than it is without drafts. It estimates each drafter's
gain, and pauses a drafter that loses time."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median, median_low

from eesd.controllers import RoundOutcome


@dataclass(frozen=True)
class Terms:
    """Limits on the time that drafters may lose. The unit of time is a plain step.

    ``stake`` and ``allowance`` set the limit. A drafter that does not pay loses about one step at
    first, and then half a percent of the time. The other terms keep losses from measurement errors
    within this limit. ``lab/starts.py`` simulates processes on disturbed machines. With these
    values, a drafter that pays is never locked out there, and any other drafter soon stops
    (decision 0086).

    Attributes:
        stake: Balance of a new account.
        allowance: Amount added to every account for each committed token.
        most: Maximum balance. It is chosen so that earlier gains pay for at most one bad text.
        margin: Gain that a drafting round must exceed, because measurement errors can be as large.
        doubt: Number of imagined rounds with zero luck that are included in the average of luck.
            They are included because a few rejections prove nothing.
        memory: Time constant of an account's memory. It is in rounds or, during a pause, in tokens.
        trial: Minimum number of rounds before a drafter's first pause, and number of rounds that a
            balance must cover to end a pause. A first call may take ten times as long as later
            calls. Without a trial, a process that paused after its first draft did not draft for
            250 tokens.
        switch: Cost of a switch from drafting to plain decoding, whose first round finds the
            processor's caches filled by the draft.
        near: Number of plain rounds in a probe. The probe is compared with the same number of
            drafting rounds before and after it. All these rounds are near in time, so they run
            under the same load.
        first_interval: Number of drafting rounds before the second probe. The interval doubles
            after each probe.
        longest_interval: Largest interval.
        sure: If a drafter expects at least this number of tokens (not counting the bonus token), it
            may draft even during a pause. The text's tokens are judged during a pause, too, so this
            expectation is up to date. Without this rule, a stall that overdrew the account would
            stop the copying of repeated text.
        slower: Factor by which the pace must change for plain decoding to be measured immediately.
    """

    stake: float = 0.8
    allowance: float = 0.0045
    most: float = 8.0
    margin: float = 0.05
    doubt: float = 4.0
    memory: float = 64.0
    trial: int = 3
    switch: float = 0.1
    near: int = 4
    first_interval: int = 16
    longest_interval: int = 256
    sure: float = 2.0
    slower: float = 1.3


TERMS = Terms()


class StepPrices:
    """The prices of a part of a round for each number of steps or nodes. The unit is a plain step.

    Attributes:
        medians: The price of each count. It is a median, because machine stalls hardly affect a
            median. Set by :meth:`add`.
    """

    def __init__(self) -> None:
        self.medians = {0: 0.0}
        self._samples: dict[int, deque[float]] = {}

    def add(self, count: int, price: float, near: int) -> None:
        """Add a sample. The last ``4 near + 1`` samples are kept. If there are fewer than ``near``
        samples, the price is the smallest sample, because disturbances only ever add time."""
        samples = self._samples.setdefault(count, deque(maxlen=4 * near + 1))
        samples.append(price)
        self.medians[count] = median_low(samples) if len(samples) >= near else min(samples)

    def forget(self) -> None:
        """Drop the samples. Prices stay until new samples are added."""
        self._samples.clear()


class Account:
    """The balance of one drafter, and the gain of its rounds.

    Attributes:
        paused: Whether the drafter is paused now. Set by :meth:`drafted` and :meth:`earn`.
        draft: Prices of its drafts for each number of steps. A drafter without an engine has no
            steps.
    """

    def __init__(self, terms: Terms, verify: StepPrices, tokens: int) -> None:
        """Open an account. ``tokens`` is the number of tokens committed so far."""
        self.paused = False
        self.draft = StepPrices()
        self._terms = terms
        self._verify = verify
        self._rounds: dict[tuple[int, int], float] = {}
        """The weights of the remembered rounds for each number of draft steps and nodes."""
        self._expected = 0.0
        """Expected number of tokens of these rounds."""
        self._luck = 0.0
        """Number of tokens by which these rounds exceeded the expectation."""
        self._balance = min(terms.stake + terms.allowance * tokens, terms.most)
        self._rounds_seen = 0

    @property
    def gain(self) -> float:
        """The gain of a round beyond the margin, in plain steps. The gain is the round's tokens
        minus its price. It is 0 if no rounds are remembered."""
        rounds = sum(self._rounds.values())
        if not rounds:
            return 0.0
        draft = self.draft.medians
        verify = self._verify.medians
        cost = sum(
            [
                weight * (draft[steps] + verify[nodes])
                for (steps, nodes), weight in self._rounds.items()
            ]
        )
        luck = self._luck / (rounds + self._terms.doubt)
        return (self._expected - cost) / rounds + luck - self._terms.margin

    def drafted(self, outcome: RoundOutcome) -> bool:
        """Record a round of this drafter in the account. Returns whether a pause begins."""
        terms = self._terms
        self._forget(1.0)
        shape = outcome.steps, outcome.nodes
        self._rounds[shape] = self._rounds.get(shape, 0.0) + 1
        self._expected += outcome.expected
        self._luck += outcome.accepted + 1 - outcome.expected
        self._rounds_seen += 1
        self._balance = min(max(self._balance + self.gain, -2 * terms.stake), terms.most)
        if self._rounds_seen == terms.trial:  # prices are known by now
            self._balance = max(self._balance, terms.stake + terms.trial * self.gain)
        pauses = self._balance < 0 and self._rounds_seen >= terms.trial
        self.paused = self.paused or pauses
        return pauses

    def earn(self, tokens: int) -> None:
        """Add the allowance for the tokens of a round, with or without a draft. A pause ends when
        the balance pays for a trial."""
        terms = self._terms
        self._balance = min(self._balance + terms.allowance * tokens, terms.most)
        if self.paused:
            if sum(self._rounds.values()) > terms.doubt:
                self._forget(tokens)
            trial = min(terms.trial * max(-self.gain, 0.0), terms.stake)
            self.paused = self._balance < terms.switch + trial

    def _forget(self, age: float) -> None:
        keep = max(1 - age / self._terms.memory, 0.0)
        self._rounds = {
            shape: weight * keep for shape, weight in self._rounds.items() if weight > 0.01
        }
        self._expected = self._expected * keep
        self._luck = self._luck * keep


class Guard:
    """Lets a drafter draft while its account is not overdrawn. Each drafter has an account under
    its name.

    Tokens are counted exactly, so only the share of luck in them is estimated. Seconds are noisy,
    and change with the machine's load. So the charge for a round is not the time that it took, but
    the median *price*, in plain steps, of such rounds. Prices are measured only close to plain
    rounds, under the same load.

    Attributes:
        pauses: Number of pauses so far. :meth:`observe` counts them.
        plain_step: Seconds of a plain round, or 0 while they are unknown. Set by :meth:`observe`.
    """

    def __init__(self, terms: Terms = TERMS) -> None:
        self.pauses = 0
        self._terms = terms
        self._verify = StepPrices()
        """The prices of a round without its draft, for each number of nodes."""
        self._accounts: dict[str, Account] = {}
        self._tokens = 0
        """Number of tokens of all rounds."""
        self._plain: deque[float] = deque(maxlen=5)
        """The seconds of plain rounds since the last draft. The first such round is left out,
        because it finds the processor's caches filled by the draft."""
        self.plain_step = 0.0
        self._recent: deque[RoundOutcome] = deque(maxlen=terms.near)
        """The last drafting rounds."""
        self._pace: deque[float] = deque(maxlen=2 * terms.near)
        """The seconds of the last drafting rounds, divided by the seconds that such rounds usually
        take."""
        self._drafts_since = 0
        """Number of drafting rounds since plain rounds were last measured."""
        self._interval = terms.first_interval
        self._probing = terms.near
        """Number of plain rounds that the probe still needs."""
        self._after_draft = True

    def allows(self, drafter: str, sure: float = 0.0) -> bool:
        """Return whether a drafter may draft in this round. During a probe, no drafter may draft.

        Args:
            drafter: Name of the drafter.
            sure: The drafter's expected number of tokens (not counting the bonus token), if it is
                known without drafting.
        """
        if self._probing:
            return False
        return sure >= self._terms.sure or not self._account(drafter).paused

    def observe(self, outcome: RoundOutcome) -> bool:
        """Learn from a committed round. Returns whether a pause begins."""
        pauses = False
        if not outcome.nodes:
            self._measure_plain(outcome.seconds)
        elif self.plain_step:
            account = self._account(outcome.drafter)
            self._measure_draft(outcome, account.draft)
            pauses = account.drafted(outcome)
            self.pauses += pauses
            if account.paused:  # the current load must not affect the trial after the pause
                (account.draft if outcome.steps else self._verify).forget()
        self._tokens += outcome.accepted + 1
        for account in self._accounts.values():
            account.earn(outcome.accepted + 1)
        return pauses

    def _account(self, drafter: str) -> Account:
        if drafter not in self._accounts:
            self._accounts[drafter] = Account(self._terms, self._verify, self._tokens)
        return self._accounts[drafter]

    def _measure_plain(self, seconds: float) -> None:
        self._probing = max(self._probing - 1, 0)
        if self._after_draft:
            self._after_draft = False
            self._plain.clear()
            return
        self._plain.append(seconds)
        if len(self._plain) >= self._terms.near - 1:
            self.plain_step = median(self._plain)
            self._compare(self._recent)
            self._recent.clear()
            self._pace.clear()
            self._drafts_since = 0

    def _measure_draft(self, outcome: RoundOutcome, prices: StepPrices) -> None:
        terms = self._terms
        draft = prices.medians
        verify = self._verify.medians
        self._after_draft = True
        self._drafts_since += 1
        is_new = outcome.steps not in draft or outcome.nodes not in verify
        if is_new or self._drafts_since <= terms.near:
            self._compare([outcome])
        self._recent.append(outcome)
        usual = self.plain_step * (draft[outcome.steps] + verify[outcome.nodes])
        self._pace.append(outcome.seconds / usual)
        pace = median(self._pace)
        is_known = len(self._pace) == 2 * terms.near
        if is_known and not 1 / terms.slower < pace < terms.slower:
            self._probing = terms.near
            self._interval = terms.first_interval
        elif self._drafts_since >= self._interval:
            self._probing = terms.near
            self._interval = min(2 * self._interval, terms.longest_interval)

    def _compare(self, outcomes: Iterable[RoundOutcome]) -> None:
        """Learn prices from drafting rounds that are close in time to plain rounds."""
        near = self._terms.near
        for outcome in outcomes:
            drafting = outcome.draft_seconds if outcome.steps else 0.0
            if outcome.steps:
                prices = self._account(outcome.drafter).draft
                prices.add(outcome.steps, drafting / self.plain_step, near)
            self._verify.add(outcome.nodes, (outcome.seconds - drafting) / self.plain_step, near)
