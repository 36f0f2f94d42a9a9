"""What a controller is told, and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    from eesd.controllers.value import RoundValue


class DraftStep(NamedTuple):
    """One draft step, told right after it ran.

    Attributes:
        depth: Levels drafted in this round; 1 after the first step.
        probability: The draft's probability of the token just drafted (tree: of the new level's best node).
        path_probability: Product of the probabilities along that token's path.
        margin: The token's score minus that of the best other token, in nats. With coupled sampling scores include the noise.
        nodes: Nodes drafted in this round; equals ``depth`` for a chain.
    """

    depth: int
    probability: float
    path_probability: float
    margin: float
    nodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundOutcome:
    """One committed round.

    Attributes:
        steps: Draft steps that ran; 0 in a round of plain decoding, and in one that verifies what the text proposed.
        draft_seconds: Time until the draft was complete, the controller's own time included.
        depth: Deepest level of the draft that was verified. Less than ``steps`` where a tree budget dropped levels. Tokens of
            the text do not count.
        nodes: Nodes that were verified, the root not counted.
        verify_seconds: Time of the verify pass over these nodes and the root.
        accepted: Draft tokens that the verifier accepted, also behind the end of the text, where nothing is committed.
        num_expanded: Accepted tokens whose node the draft had expanded. Lower than ``accepted`` when an accepted token was a
            candidate that was never expanded, or the text's.
        copied: Tokens of the text that were verified before the first drafted one.
        first_right: Whether the first drafted token was right, also where it was not verified; None: nothing was drafted.
    """

    steps: int
    draft_seconds: float
    depth: int
    nodes: int
    verify_seconds: float
    accepted: int
    num_expanded: int
    copied: int = 0
    first_right: bool | None = None


class Controller:
    """Decides after each draft step whether to run another. Subclasses override what they need.

    For each round that may draft a session calls :meth:`begin_round` once and :meth:`keep_drafting` after each step; for each
    round that is committed, :meth:`observe`. A round that is cancelled is never observed.

    Attributes:
        value: What rounds cost and are worth, if it asks. Other rules may share it, so a session teaches it by itself.
        steps_at_once: Steps of a chain that a device may run before it asks: each answer makes it wait for the host. 0: one.
    """

    steps_at_once: ClassVar[int] = 0
    value: "RoundValue | None" = None

    def begin_request(self) -> None:
        """Another request begins: what was learned about the previous text may not hold for it."""

    def begin_round(self, width: int) -> int | None:
        """Begin a round whose tree has ``width`` nodes a level (1: a chain).

        Returns:
            The number of draft steps, if it is known already, so that no step has to wait for an answer; 0 for a round
            without drafts. None: ask :meth:`keep_drafting` after each step.
        """
        return None

    def begin_after_text(self, width: int, copied: Sequence[float]) -> bool:
        """Begin a round that verifies tokens of the text: whether to draft after them, step by step.

        Args:
            width: Nodes of a level.
            copied: For each of these tokens, the chance that it and all before it are right.
        """
        return False

    def keep_drafting(self, step: DraftStep) -> bool:
        """Whether to draft one more token (tree: one more level)."""
        raise NotImplementedError

    def expected_tokens(self, outcome: RoundOutcome) -> float:
        """Tokens that a round like this one brings on average, told before :meth:`observe`; what it brought, if not known."""
        return outcome.accepted + 1

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a committed round. One without draft steps, which may not have been asked for, tells only its cost."""
