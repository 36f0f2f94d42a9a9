"""What a controller sees and what it answers."""

from typing import Any, NamedTuple, Protocol


class DraftStep(NamedTuple):
    """One step of the draft, told right after it was made.

    ``depth`` counts the tokens drafted this round on the deepest path (1 after the first step). ``probability`` is the draft's
    own probability of the token just drafted (in a tree: of the best node of the new level), ``path_probability`` the
    product along its path. ``entropy`` (nats) is of the distribution it came from, only where the controller asks for it.
    ``margin`` (nats) is how far the token's score lies above that of the best other token: the log-odds of the two, with their
    noise where sampling is coupled. ``nodes`` counts all drafted nodes; in a chain it equals ``depth``.
    """

    depth: int
    probability: float
    path_probability: float
    entropy: float | None
    margin: float
    nodes: int


class RoundOutcome(NamedTuple):
    """What became of a round.

    ``drafted`` is the depth that was verified (0: plain decoding) and ``accepted`` how much of it was right. ``draft_seconds``
    is all the time until the draft was complete, the controller's own included; ``verify_seconds`` that of the verify pass over
    ``nodes`` drafted nodes and the root. ``steps`` counts the draft's calls: more than ``drafted`` where levels were left out.
    ``followed`` is how far what was right had been drafted on: less than ``accepted`` where a second choice came true, behind
    which nothing was drafted.
    """

    drafted: int
    accepted: int
    draft_seconds: float
    verify_seconds: float
    nodes: int
    steps: int
    followed: int


class Controller(Protocol):
    """Decides after each draft step whether to draft another. What is defined here may be left as it is."""

    needs_entropy: bool = False

    def begin_request(self) -> None:
        """Another request starts: what was learned of the text before may not hold for it."""
        return

    def length_ahead(self) -> int | None:
        """Asked once at the start of a round: how many tokens to draft if that is known already, so that no step has to wait
        for an answer; 0 for a round without drafts. None: ask :meth:`keep_drafting` after each step."""
        return None

    def keep_drafting(self, step: DraftStep) -> bool:
        """Whether to draft one more token (tree: one more level)."""
        ...

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a verified round. A cancelled round is never told."""
        return

    def state(self) -> dict[str, Any]:
        """Everything learned and the random state, as JSON values."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a ``state()``."""
        ...
