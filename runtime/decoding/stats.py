"""The result of a round, and the statistics of a request."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from eesd.controllers.base import TEXT, RoundOutcome

BY_DEPTH = (
    "verified_at_depth",
    "accepted_at_depth",
    "text_verified_at_depth",
    "text_accepted_at_depth",
)
"""The lists of :class:`Stats` with a number for each depth."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The committed tokens of one round, and its costs for statistics. Comparisons of results
    ignore the costs.

    Attributes:
        tokens: The committed tokens, at least one. The first ``num_accepted`` tokens were drafted.
            The bonus token follows them, unless the text ends before it.
        num_accepted: Number of committed draft tokens. Tokens that the verifier accepts after the
            end of the text are not committed.
        finish_reason: ``stop`` (EOS), ``length`` (max_new_tokens or the end of the cache), or None
            if ``step`` must be called again.
        sources: Name of the drafter of each accepted token.
        rejected: The tokens of the best verified path that follow the accepted tokens.
        outcome: The outcome for the round's observers. It also counts tokens after the end of the
            text.
        judged: Name of the drafter of each judged token. The judged tokens are the accepted tokens
            and the first rejected token.
        levels: Depth of the deepest verified node.
        drafting: Whether the round was allowed to draft.
        draft_seconds: Time in the draft engine.
    """

    tokens: list[int]
    num_accepted: int
    finish_reason: str | None
    sources: Sequence[str]
    rejected: Sequence[int]
    outcome: RoundOutcome = field(compare=False)
    judged: Sequence[str] = field(compare=False)
    levels: int = field(compare=False)
    drafting: bool = field(compare=False)
    draft_seconds: float = field(compare=False)


@dataclass
class Stats:
    """Counts and seconds of one request.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        new_tokens: Number of generated tokens, up to the end of the text.
        rounds: Number of verify passes.
        drafting_rounds: Number of rounds in which a drafter was allowed to draft.
        text_rounds: Number of rounds without a draft step, which verified only tokens that the text
            proposed.
        draft_steps: Number of calls of the draft engine.
        draft_tokens: Number of verified draft tokens, including tokens after the end of the text.
        accepted_tokens: Number of draft tokens among the new tokens.
        accepted_text_tokens: Number of accepted tokens that the text proposed.
        verified_at_depth: Number of rounds whose draft was judged at depth 1, 2, ... A draft is
            judged at a depth if it reached that depth and all tokens before it were accepted.
        accepted_at_depth: Number of these rounds in which the token at that depth was accepted.
        text_verified_at_depth, text_accepted_at_depth: The same two numbers for tokens that the
            text proposed.
        guard_pauses: Number of times that the guard paused a drafter.
        exact: Whether a check at load time found that logits do not depend on a call's number of
            rows. It is None if there was no check.
        prefill_seconds, draft_seconds, verify_seconds: Time in the engines.
        host_seconds: The rest of the decode time, which sampling, the tree and the controller take.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    rounds: int = 0
    drafting_rounds: int = 0
    text_rounds: int = 0
    draft_steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_text_tokens: int = 0
    verified_at_depth: list[int] = field(default_factory=list)
    accepted_at_depth: list[int] = field(default_factory=list)
    text_verified_at_depth: list[int] = field(default_factory=list)
    text_accepted_at_depth: list[int] = field(default_factory=list)
    guard_pauses: int = 0
    exact: bool | None = None
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    host_seconds: float = 0.0

    @property
    def decode_seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds + self.host_seconds

    @property
    def tokens_per_second(self) -> float:
        return _ratio(self.new_tokens, self.decode_seconds)

    @property
    def tokens_per_round(self) -> float:
        return _ratio(self.new_tokens, self.rounds)

    @property
    def acceptance(self) -> float:
        """The share of the judged draft tokens that were accepted."""
        return _ratio(sum(self.accepted_at_depth), sum(self.verified_at_depth))

    @property
    def host_share(self) -> float:
        """The share of the decode time that is spent outside both engines."""
        return _ratio(self.host_seconds, self.decode_seconds)

    def with_round(self, result: RoundResult) -> "Stats":
        """Return a copy with one more round."""
        stats = Stats(**vars(self))
        outcome = result.outcome
        stats.new_tokens += len(result.tokens)
        stats.rounds += 1
        stats.draft_seconds += result.draft_seconds
        stats.verify_seconds += outcome.verify_seconds
        stats.host_seconds += outcome.seconds - result.draft_seconds - outcome.verify_seconds
        stats.drafting_rounds += result.drafting
        stats.text_rounds += outcome.drafter == TEXT
        stats.draft_steps += outcome.steps
        stats.draft_tokens += outcome.nodes
        stats.accepted_tokens += result.num_accepted
        stats.accepted_text_tokens += result.sources.count(TEXT)
        more = [0] * (result.levels - len(self.verified_at_depth))
        for name in BY_DEPTH:
            setattr(stats, name, getattr(self, name) + more)
        # The draft token at the depth of the bonus token was judged, too, and it is wrong.
        for level in range(min(result.levels, len(result.tokens))):
            stats.verified_at_depth[level] += 1
            stats.accepted_at_depth[level] += level < result.num_accepted
        for level, source in enumerate(result.judged[: result.levels]):
            if source == TEXT:
                stats.text_verified_at_depth[level] += 1
                stats.text_accepted_at_depth[level] += level < result.num_accepted
        return stats

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and the derived figures as JSON values."""
        derived = (
            "decode_seconds",
            "tokens_per_second",
            "tokens_per_round",
            "acceptance",
            "host_share",
        )
        return asdict(self) | {name: getattr(self, name) for name in derived}


def _ratio(part: float, whole: float) -> float:
    """Return ``part / whole``, or 0 if ``whole`` is 0."""
    return part / whole if whole else 0.0
