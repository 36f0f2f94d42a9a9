"""What a request did and where its time went."""

from dataclasses import asdict, dataclass, field
from typing import Any

from eesd.runtime.decoding.round import RoundResult


@dataclass
class Stats:
    """Counts and seconds of one request.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        new_tokens: Tokens generated: those of the text, and no token behind its end.
        rounds: Verify passes.
        drafting_rounds: Rounds in which drafting was allowed, by the exit head or from the text.
        text_rounds: Those of them that verified what the text proposed, without a draft step.
        draft_steps: Calls of the draft engine.
        draft_tokens: Draft tokens that were verified, also behind the end of the text.
        accepted_tokens: Draft tokens that were accepted: those of them among the new tokens.
        accepted_text_tokens: Those of them that the text proposed, and the exit head did not.
        verified_at_depth: Rounds whose draft reached depth 1, 2, ... and was judged there (all
            before was accepted).
        accepted_at_depth: Of these, the rounds whose token at that depth was accepted.
        text_verified_at_depth, text_accepted_at_depth: The same for tokens that the text proposed.
        guard_pauses: Times that the guard paused drafting.
        exact: Whether a check found, when the engines were loaded, that logits do not depend on a
            call's number of rows; None: not checked.
        prefill_seconds, draft_seconds, verify_seconds: Time in the engines.
        host_seconds: The rest of the decode time: sampling, the tree, the controller.
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
        return self.new_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def tokens_per_round(self) -> float:
        return self.new_tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> float:
        """Share of the judged draft tokens that were accepted."""
        judged = sum(self.verified_at_depth)
        return sum(self.accepted_at_depth) / judged if judged else 0.0

    @property
    def host_share(self) -> float:
        """Share of the decode time spent outside both engines."""
        return self.host_seconds / self.decode_seconds if self.decode_seconds else 0.0

    def with_round(self, result: RoundResult) -> "Stats":
        """These statistics and one more round."""
        stats = Stats(**vars(self))
        outcome = result.outcome
        stats.new_tokens += len(result.tokens)
        stats.rounds += 1
        stats.draft_seconds += result.draft_seconds
        stats.verify_seconds += outcome.verify_seconds
        stats.host_seconds += outcome.seconds - result.draft_seconds - outcome.verify_seconds
        stats.drafting_rounds += result.drafting
        stats.text_rounds += outcome.nodes > 0 and not outcome.steps
        stats.draft_steps += outcome.steps
        stats.draft_tokens += outcome.nodes
        stats.accepted_tokens += result.num_accepted
        stats.accepted_text_tokens += sum(result.from_text)
        more = [0] * (result.levels - len(self.verified_at_depth))
        stats.verified_at_depth = [*self.verified_at_depth, *more]
        stats.accepted_at_depth = [*self.accepted_at_depth, *more]
        stats.text_verified_at_depth = [*self.text_verified_at_depth, *more]
        stats.text_accepted_at_depth = [*self.text_accepted_at_depth, *more]
        # The bonus token says that a draft token is wrong.
        for level in range(min(result.levels, len(result.tokens))):
            stats.verified_at_depth[level] += 1
            stats.accepted_at_depth[level] += level < result.num_accepted
        for level, from_text in enumerate(result.judged_text):
            if from_text:
                stats.text_verified_at_depth[level] += 1
                stats.text_accepted_at_depth[level] += level < result.num_accepted
        return stats

    def to_dict(self) -> dict[str, Any]:
        """All fields and the derived figures, as JSON values."""
        derived = (
            "decode_seconds",
            "tokens_per_second",
            "tokens_per_round",
            "acceptance",
            "host_share",
        )
        return asdict(self) | {name: getattr(self, name) for name in derived}
