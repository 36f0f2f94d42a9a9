"""What a controller sees and what it answers."""

from typing import Any, NamedTuple, Protocol


class DraftStep(NamedTuple):
    """One step of the draft, told right after it was made.

    ``depth`` counts the tokens drafted this round on the deepest path (1 after the first step). ``probability`` is the draft's
    own probability of the token just drafted (in a tree: of the best node of the new level), ``path_probability`` the
    product along its path. ``entropy`` (nats) is of the distribution it came from, only where the controller asks for it.
    """

    depth: int
    probability: float
    path_probability: float
    entropy: float | None


class RoundOutcome(NamedTuple):
    """What became of a round: tokens drafted (depth reached) and accepted, and the seconds that both engines took."""

    drafted: int
    accepted: int
    draft_seconds: float
    verify_seconds: float


class Controller(Protocol):
    """Decides after each draft step whether to draft another. The first token of a round is always drafted."""

    needs_entropy: bool

    def keep_drafting(self, step: DraftStep) -> bool:
        """Whether to draft one more token (tree: one more level)."""
        ...

    def length_ahead(self) -> int | None:
        """The tokens to draft in the round that begins, where that is decided before its first step; else None.

        A device can then draft them without asking the host after each.
        """
        ...

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a verified round. A cancelled round is never told."""
        ...

    def state(self) -> dict[str, Any]:
        """Everything learned and the random state, as JSON values."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a ``state()``."""
        ...
