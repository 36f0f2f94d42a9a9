"""What a request did and where its time went."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Stats:
    """Counts and seconds of one request; they grow as it runs."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    rounds: int = 0
    drafting_rounds: int = 0
    draft_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    offered_at_depth: list[int] = field(default_factory=list)
    """Rounds whose draft reached depth 1, 2, ... and was judged there (all before was accepted)."""
    accepted_at_depth: list[int] = field(default_factory=list)
    guard_rests: int = 0
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
        """Probability that a drafted token was accepted, of those that were judged."""
        offered = sum(self.offered_at_depth)
        return sum(self.accepted_at_depth) / offered if offered else 0.0

    @property
    def host_share(self) -> float:
        """Part of the decode time spent outside both engines."""
        return self.host_seconds / self.decode_seconds if self.decode_seconds else 0.0

    def judge(self, depth: int, accepted: int) -> None:
        """Note a round that drafted to ``depth`` and had ``accepted`` levels accepted."""
        while len(self.offered_at_depth) < depth:
            self.offered_at_depth.append(0)
            self.accepted_at_depth.append(0)
        for level in range(min(depth, accepted + 1)):
            self.offered_at_depth[level] += 1
            self.accepted_at_depth[level] += level < accepted

    def to_dict(self) -> dict[str, Any]:
        """Everything, the derived figures included, as JSON values."""
        derived = ("decode_seconds", "tokens_per_second", "tokens_per_round", "acceptance", "host_share")
        return asdict(self) | {name: getattr(self, name) for name in derived}
